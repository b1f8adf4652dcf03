//! Memory of a GPU over several allocations that adjoin, as PyTorch's expandable segments are; and what looks like it. Host memory that
//! the application pins itself.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use cudarc::driver::sys as cu;
use immwire_cuda::{Device, Event, Stream};

use crate::host::patience;

/// Bytes of each part.
pub const PART: u64 = 2 << 20;
const PART_BYTES: usize = 2 << 20;

/// What a part of a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// An allocation of this GPU.
    Of(u32),
    /// One that no other process can be given.
    Private(u32),
    /// The allocation before, once more.
    Again,
    /// Addresses, and nothing there.
    Hole,
}

/// Reserved addresses, and what is mapped there. Stays as long as the process, unless it is freed.
#[derive(Debug)]
pub struct Segment {
    device: Device,
    at: u64,
    parts: Vec<Part>,
}

fn ok(answer: cu::CUresult) {
    assert_eq!(answer, cu::CUresult::CUDA_SUCCESS);
}

/// Makes the context of a GPU current for a call.
fn within<R>(device: &Device, call: impl FnOnce() -> R) -> R {
    // SAFETY: the context is alive as long as the device; it is taken off below.
    ok(unsafe { cu::cuCtxPushCurrent_v2(device.context().cast()) });
    let result = call();
    let mut popped = std::ptr::null_mut();
    // SAFETY: takes off what was pushed above.
    ok(unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) });
    result
}

fn location(ordinal: u32) -> cu::CUmemLocation {
    let id = i32::try_from(ordinal).expect("small");
    cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// New memory of a GPU.
fn create(ordinal: u32, shareable: bool) -> u64 {
    use cu::CUmemAllocationHandleType_enum as H;
    let wanted = cu::CUmemAllocationProp {
        type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if shareable {
            H::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            H::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 1,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let mut physical = 0;
    // SAFETY: writes the one handle, reads the one structure.
    ok(unsafe { cu::cuMemCreate(&raw mut physical, PART_BYTES, &raw const wanted, 0) });
    physical
}

impl Segment {
    /// So many allocations of one GPU, zeroed.
    pub fn new(ordinal: u32, parts: usize) -> Self {
        Self::of(&vec![Part::Of(ordinal); parts])
    }

    /// These parts, in their order; the first says whose stream zeroes them, and which GPU reaches them all.
    pub fn of(parts: &[Part]) -> Self {
        let (Some(Part::Of(ordinal) | Part::Private(ordinal)), bytes) =
            (parts.first(), parts.len() * PART_BYTES)
        else {
            panic!("{parts:?}")
        };
        let device = Device::open(*ordinal).expect("a GPU");
        let stream = Stream::new(&device).expect("a stream");
        let access = cu::CUmemAccessDesc {
            location: location(*ordinal),
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut at = 0;
        let mut last = None;
        within(&device, || {
            // SAFETY: writes the one address.
            ok(unsafe { cu::cuMemAddressReserve(&raw mut at, bytes, 0, 0, 0) });
            for (part, there) in parts.iter().zip((at..).step_by(PART_BYTES)) {
                let physical = match *part {
                    Part::Of(ordinal) => create(ordinal, true),
                    Part::Private(ordinal) => create(ordinal, false),
                    Part::Again => last.take().expect("one before"),
                    Part::Hole => continue,
                };
                if let Some(before) = last.replace(physical) {
                    // SAFETY: a reference of ours; what is mapped keeps the memory.
                    ok(unsafe { cu::cuMemRelease(before) });
                }
                // SAFETY: reserved above, and mapped once; the memory is as long. Nobody else knows of it yet.
                unsafe {
                    ok(cu::cuMemMap(there, PART_BYTES, 0, physical, 0));
                    ok(cu::cuMemSetAccess(there, PART_BYTES, &raw const access, 1));
                    ok(cu::cuMemsetD8Async(there, 0, PART_BYTES, stream.raw().cast()));
                }
            }
            // SAFETY: as above.
            last.into_iter().for_each(|physical| ok(unsafe { cu::cuMemRelease(physical) }));
        });
        let event = Event::new(&device).expect("an event");
        event.record(&stream).and_then(|()| event.wait(patience())).expect("zeroed");
        Self { device, at, parts: parts.to_vec() }
    }

    /// What is so many bytes behind the first.
    pub fn ptr(&self, offset: u64) -> NonNull<u8> {
        NonNull::new((self.at + offset) as *mut u8).expect("an address")
    }

    /// Gives it back. Nobody uses it any more.
    pub fn free(self) {
        within(&self.device, || {
            for (part, there) in self.parts.iter().zip((self.at..).step_by(PART_BYTES)) {
                if *part != Part::Hole {
                    // SAFETY: mapped so by `of`; our caller says that nobody uses it.
                    ok(unsafe { cu::cuMemUnmap(there, PART_BYTES) });
                }
            }
            // SAFETY: reserved by `of`; nothing is mapped there any more.
            ok(unsafe { cu::cuMemAddressFree(self.at, self.parts.len() * PART_BYTES) });
        });
    }
}

/// Pins host memory, as an application does; `false`: some of it is pinned already.
///
/// # Safety
///
/// It stays mapped until it has been unpinned.
pub unsafe fn pin(at: u64, bytes: u64) -> bool {
    let device = Device::open(0).expect("GPU 0");
    let bytes = usize::try_from(bytes).expect("64-bit");
    // SAFETY: our caller's promise.
    match within(&device, || unsafe { cu::cuMemHostRegister_v2(at as *mut c_void, bytes, 0) }) {
        cu::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => false,
        answer => {
            ok(answer);
            true
        }
    }
}

/// Unpins what was pinned from there on.
pub fn unpin(at: u64) {
    let device = Device::open(0).expect("GPU 0");
    // SAFETY: the driver knows what is pinned.
    ok(within(&device, || unsafe { cu::cuMemHostUnregister(at as *mut c_void) }));
}

/// How much of GPUs' memory this process has taken by hand; `None`: the driver is not the stand-in, which counts.
pub fn kept() -> Option<u64> {
    // Loaded, if it was not yet.
    Device::count().ok()?;
    let call: extern "C" fn() -> u64 = driver_s(c"immwire_fake_cuda_kept")?;
    Some(call())
}

/// Has the process's GPUs begin nothing that moves bytes, or again: they are stuck. Only the stand-in for the driver can: `false`
/// elsewhere.
pub fn stick(held: bool) -> bool {
    let call: Option<extern "C" fn(u32)> = driver_s(HOLD);
    call.inspect(|call| call(u32::from(held))).is_some()
}

/// How many streams of the process are held up so.
pub fn held_up() -> u64 {
    let call: Option<extern "C" fn() -> u64> = driver_s(c"immwire_fake_cuda_held_up");
    call.map_or(0, |call| call())
}

/// Waits, by so many naps as it takes, until the driver keeps this process's callers waiting, since one of them waits for a GPU. A driver that
/// is not the stand-in does not tell: it is given a while.
pub fn until_kept_waiting(nap: impl Fn(Duration)) {
    let call: Option<extern "C" fn() -> u64> = driver_s(c"immwire_fake_cuda_kept_waiting");
    let Some(call) = call else { return nap(Duration::from_millis(50)) };
    let start = Instant::now();
    while call() == 0 {
        assert!(start.elapsed() < patience(), "nobody is kept waiting");
        nap(Duration::from_millis(1));
    }
}

/// Waits for all that GPUs have been given.
pub fn go_on() {
    for gpu in 0..Device::count().expect("GPUs") {
        Device::open(gpu).and_then(|gpu| gpu.synchronize()).expect("no error");
    }
}

/// A function that the stand-in for the driver has, and no other.
const HOLD: &std::ffi::CStr = c"immwire_fake_cuda_hold";

/// Tests that ask of a driver what only the stand-in does: to be held, to refuse, to say how often it was asked. On any other they are left out.
pub const ON_THE_STAND_IN: &[&str] = &[
    "counts_come_after_a_flush",
    "late_copies_of_the_host",
    "late_zeroes",
    "stuck",
    "closed_beside_another",
    "refused_copies",
    "refused_among_others",
    "short_writes_at_the_end",
    "closed_between_two_launches",
    "memory_that_cannot_be_opened_now",
    "copies_refused_at_either_end",
    "others_go_past_a_slow_gpu",
    "a_broken_rule_costs_the_peer",
    "stuck_where_it_is_written",
    "stuck_where_it_is_read",
    "nobody_gets_what_is_still_read",
    "slots_come_back_after_errors",
    "no_memory_for_an_exchange_while_the_gpu_is_busy",
    "refused_as_an_exchange_starts_over",
];

/// Whether the driver that engines will load is the stand-in.
pub fn is_stand_in() -> bool {
    // SAFETY: what engines load, too: a driver's start does nothing yet.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: a library's handle, and a name.
    !driver.is_null() && !unsafe { libc::dlsym(driver, HOLD.as_ptr()) }.is_null()
}

/// A function of the driver's, or one that only the stand-in for it has, if it is there. `F` is its type (`cuda.h`,
/// `verification/fake-cuda/src`).
pub fn driver_s<F: Copy>(name: &std::ffi::CStr) -> Option<F> {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: it is loaded, by us; nothing is loaded by this.
    let driver =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!driver.is_null(), "an engine has loaded the driver");
    // SAFETY: a library's handle, and a name.
    let found = unsafe { libc::dlsym(driver, name.as_ptr()) };
    // SAFETY: the function of that name, of this type: our callers know.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
}
