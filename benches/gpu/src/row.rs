//! Allocations of one GPU, one behind the other, as frameworks make large tensors that grow (PyTorch's expandable segments).

use cudarc::driver::sys as cu;
use immwire_cuda::Device;
use std::error::Error;

/// Of one allocation of `cuMemCreate`, on all GPUs that there are.
pub(crate) const GRANULE: usize = 2 << 20;

/// So many of a granule each, in addresses that were reserved for them, and perhaps for more. What they hold is nobody's.
pub(crate) struct Row {
    device: Device,
    pub(crate) at: u64,
    parts: usize,
    /// First byte and length.
    pub(crate) reserved: (u64, usize),
}

impl Row {
    pub(crate) fn new(device: &Device, parts: usize) -> Result<Self, Box<dyn Error>> {
        Self::within(device, 0, parts, 0)
    }

    /// With addresses for so many granules before and behind it, where nothing is.
    pub(crate) fn within(
        device: &Device,
        before: usize,
        parts: usize,
        behind: usize,
    ) -> Result<Self, Box<dyn Error>> {
        let room = (before + parts + behind) * GRANULE;
        let location = cu::CUmemLocation {
            type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: i32::try_from(device.ordinal())?,
        };
        let wanted = cu::CUmemAllocationProp {
            type_: cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes:
                cu::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: cu::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 1,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let access = cu::CUmemAccessDesc {
            location,
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut row = Self { device: device.clone(), at: 0, parts: 0, reserved: (0, room) };
        // SAFETY: the context is current for as long as this is built; numbers are written where they are kept, structures
        // read that are there. What is mapped lies in what was reserved.
        unsafe {
            cu::cuCtxPushCurrent_v2(device.context().cast()).result()?;
            cu::cuMemAddressReserve(&raw mut row.reserved.0, room, 0, 0, 0).result()?;
            row.at = row.reserved.0 + (before * GRANULE) as u64;
            for there in (row.at..).step_by(GRANULE).take(parts) {
                let mut physical = 0;
                cu::cuMemCreate(&raw mut physical, GRANULE, &raw const wanted, 0).result()?;
                cu::cuMemMap(there, GRANULE, 0, physical, 0).result()?;
                cu::cuMemRelease(physical).result()?;
                row.parts += 1;
            }
            cu::cuMemSetAccess(row.at, parts * GRANULE, &raw const access, 1).result()?;
            let mut popped = std::ptr::null_mut();
            cu::cuCtxPopCurrent_v2(&raw mut popped).result()?;
        }
        Ok(row)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.parts * GRANULE
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        // SAFETY: mapped and reserved by `new`; nobody uses it any more. The context is taken off as it was put on.
        unsafe {
            if cu::cuCtxPushCurrent_v2(self.device.context().cast()).result().is_err() {
                return;
            }
            for there in (self.at..).step_by(GRANULE).take(self.parts) {
                let _ = cu::cuMemUnmap(there, GRANULE);
            }
            let _ = cu::cuMemAddressFree(self.reserved.0, self.reserved.1);
            let mut popped = std::ptr::null_mut();
            let _ = cu::cuCtxPopCurrent_v2(&raw mut popped);
        }
    }
}
