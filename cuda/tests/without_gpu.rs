//! What is answered where there is no driver, no GPU, or no compiled kernel: values, and no panic.
//!
//! On a machine with GPUs the same calls are asked to succeed.

use immwire_cuda::{Copier, Device, Error, Stream, geometry::Tuning, kernels_built_in};

#[test]
fn absence_is_an_answer() {
    match Device::count() {
        Err(Error::NoDriver) => {
            assert_eq!(Device::open(0).unwrap_err(), Error::NoDriver);
            // Asked again, it is the same.
            assert_eq!(Device::count(), Err(Error::NoDriver));
        }
        Err(why) => panic!("a driver that does not work: {why}"),
        Ok(0) => assert_eq!(Device::open(0).unwrap_err(), Error::NoDevice { ordinal: 0, count: 0 }),
        Ok(count) => {
            assert_eq!(Device::open(count).unwrap_err(), Error::NoDevice { ordinal: count, count });
            let device = Device::open(0).unwrap();
            let stream = Stream::new(&device).unwrap();
            match Copier::new(&stream, Tuning::default()) {
                Err(Error::KernelsAbsent) => assert!(!kernels_built_in()),
                copier => drop(copier.unwrap()),
            }
        }
    }
}

#[test]
fn answers_can_be_read() {
    assert_eq!(Error::NoDriver.to_string(), "no CUDA driver: libcuda.so.1 cannot be loaded");
    let error = Error::OutOfBounds { end: 17, bytes: 16 };
    assert_eq!(error.to_string(), "the range ends at 17 of 16 bytes");
    let error = Error::Misaligned { what: "word", address: 0x1004, multiple: 8 };
    assert_eq!(error.to_string(), "the word at 0x1004 is not at a multiple of 8");
}
