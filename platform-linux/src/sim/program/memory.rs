//! The byte oracle: what each byte of a window may be, and when.
//!
//! A [`Window`] is memory that peers write to. Every range that a transfer may write is claimed, with
//! the bytes that are to come; a byte inside a claim is the old one or the new one, a byte outside never
//! changes. When a transfer ends its claims go: all new if it was done, all old if it never started,
//! and what is there then stays.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::time::Duration;

use immwire_core::region::{MrDesc, Rights};

use crate::region::{CloseError, Region};
use crate::{RegisterError, TransferEngine};

/// Bytes that tell from which write they are, and from where in it.
pub(super) fn pattern(salt: u64, bytes: &mut [u8]) {
    for (word, chunk) in (0_u64..).zip(bytes.chunks_mut(8)) {
        let mixed =
            (salt ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        let mixed = (mixed ^ (mixed >> 29)).to_le_bytes();
        chunk.copy_from_slice(mixed.get(..chunk.len()).unwrap_or(&mixed));
    }
}

/// Memory of the program's own, which outlives its registrations: what is written there after the last of
/// them is found.
pub(super) struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Block {
    /// `bytes` zeros, at least one; `None` if there is no memory.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), 4096).ok()?;
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { ptr, layout })
    }

    fn read(&self, bytes: &mut [u8]) {
        let len = bytes.len().min(self.layout.size());
        // SAFETY: `len` bytes from `ptr` are ours and live; engines may write them on this very thread
        // only, which is here now; `bytes` is an exclusive slice and so elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr.as_ptr(), bytes.as_mut_ptr(), len) };
    }

    fn write(&self, bytes: &[u8]) {
        let len = bytes.len().min(self.layout.size());
        // SAFETY: as in `read`, with the roles exchanged.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr.as_ptr(), len) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

/// A range that a transfer may write, and what with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    pub(super) flight: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) salt: u64,
}

impl Claim {
    const fn overlaps(&self, start: u64, len: u64) -> bool {
        self.start < start.saturating_add(len) && start < self.start.saturating_add(self.len)
    }
}

/// What a claim's bytes must be when it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    Old,
    New,
    Either,
}

/// Why memory is not what it must be.
pub(super) type Check = Result<(), String>;

/// Memory that peers write to, and what is known of it.
pub(super) struct Window {
    /// `None`: of the engine's own, which goes with its registration.
    block: Option<Block>,
    region: Option<Region>,
    /// Which registration this is.
    pub(super) serial: u32,
    /// The bytes that nobody may have changed.
    shadow: Vec<u8>,
    claims: Vec<Claim>,
    scratch: Vec<u8>,
    /// It was to be closed, and a peer was writing: peers may have been told that it is withdrawn.
    pub(super) closing: bool,
    /// Of a registration that is no more.
    pub(super) stale: Option<MrDesc>,
}

impl Window {
    /// Memory of the program's own if `owned`, else of the engine's; not registered yet.
    pub(super) fn new(bytes: usize, owned: bool) -> Self {
        Self {
            block: owned.then(|| Block::new(bytes)).flatten(),
            region: None,
            serial: 0,
            shadow: vec![0; bytes],
            claims: Vec::new(),
            scratch: vec![0; bytes],
            closing: false,
            stale: None,
        }
    }

    pub(super) fn desc(&self) -> Option<MrDesc> {
        self.region.as_ref().map(Region::desc)
    }

    pub(super) fn len(&self) -> u64 {
        self.shadow.len() as u64
    }

    /// Registers it, unless it is.
    pub(super) fn open(&mut self, engine: &TransferEngine) -> Result<(), RegisterError> {
        if self.region.is_some() {
            return Ok(());
        }
        let region = match &self.block {
            None => engine.alloc(self.shadow.len())?,
            Some(block) => {
                let (ptr, len) = (block.ptr, self.shadow.len());
                // SAFETY: `len` bytes from `ptr` are the block's, which is freed after every engine that
                // it was registered with has stopped (see `Program::end`), and nobody holds a reference
                // to them.
                unsafe { engine.register(ptr, len, Rights::REMOTE_WRITE) }?
            }
        };
        self.region = Some(region);
        self.serial += 1;
        Ok(())
    }

    /// Withdraws it from peers, and fills it with what must stay. `Ok(false)`: a peer still writes.
    pub(super) fn close(&mut self, salt: u64) -> Result<bool, String> {
        let Some(region) = self.region.take() else { return Ok(false) };
        let desc = region.desc();
        match region.close(Duration::ZERO) {
            Ok(()) => {}
            Err(CloseError::StillWriting { region, .. }) => {
                self.region = Some(region);
                self.closing = true;
                return Ok(false);
            }
            Err(CloseError::InUse { region }) => {
                self.region = Some(region);
                return Err("a window that no transfer reads from is said to be in use".into());
            }
        }
        self.stale = Some(desc);
        self.closing = false;
        if self.block.is_some() {
            self.check()?;
            pattern(salt, &mut self.shadow);
        } else {
            self.shadow.fill(0);
        }
        self.claims.clear();
        if let Some(block) = &self.block {
            block.write(&self.shadow);
        }
        Ok(true)
    }

    /// Whether no transfer may write the range now.
    pub(super) fn is_free(&self, start: u64, len: u64) -> bool {
        start.saturating_add(len) <= self.len()
            && !self.claims.iter().any(|claim| claim.overlaps(start, len))
    }

    /// A transfer may write there from now on.
    pub(super) fn claim(&mut self, claim: Claim) {
        if claim.len > 0 {
            self.claims.push(claim);
        }
    }

    /// Whether there is anything to look at: an engine's own memory goes when it is withdrawn.
    fn load(&mut self) -> bool {
        match (&self.block, &self.region) {
            (Some(block), _) => block.read(&mut self.scratch),
            (None, Some(region)) => return region.read(0, &mut self.scratch).is_ok(),
            (None, None) => return false,
        }
        true
    }

    /// Every byte is one that it may be.
    pub(super) fn check(&mut self) -> Check {
        if !self.load() || self.scratch == self.shadow {
            return Ok(());
        }
        let claims = std::mem::take(&mut self.claims);
        let checked = claims.iter().try_for_each(|claim| self.settle(claim, Left::Either, false));
        self.claims = claims;
        checked?;
        let differ = |(at, (is, was)): (usize, (&u8, &u8))| (is != was).then_some((at, *is, *was));
        let wrong = self.scratch.iter().zip(&self.shadow).enumerate().find_map(differ);
        match wrong {
            None => Ok(()),
            Some((at, is, was)) => Err(format!(
                "byte {at} changed from {was:#04x} to {is:#04x}, which nobody was asked to write"
            )),
        }
    }

    /// Compares a claim's bytes in `scratch`; makes them what `shadow` says there, or the other way round
    /// if they are to be `kept`.
    fn settle(&mut self, claim: &Claim, left: Left, kept: bool) -> Check {
        let from = usize::try_from(claim.start).unwrap_or(usize::MAX);
        let to = from.saturating_add(usize::try_from(claim.len).unwrap_or(usize::MAX));
        let (Some(is), Some(old)) = (self.scratch.get_mut(from..to), self.shadow.get_mut(from..to))
        else {
            return Err("a claim outside its window".into());
        };
        let mut new = vec![0; is.len()];
        pattern(claim.salt, &mut new);
        for (at, ((is, old), new)) in (from..).zip(is.iter().zip(old.iter()).zip(&new)) {
            let fits = match left {
                Left::Old => is == old,
                Left::New => is == new,
                Left::Either => is == old || is == new,
            };
            if !fits {
                let must = match left {
                    Left::Old => format!("{old:#04x}, as before"),
                    Left::New => format!("{new:#04x}, as written"),
                    Left::Either => format!("{old:#04x}, as before, or {new:#04x}, as written"),
                };
                let flight = claim.flight;
                return Err(format!("byte {at} of transfer {flight} is {is:#04x}, not {must}"));
            }
        }
        if kept {
            old.copy_from_slice(is);
        } else {
            is.copy_from_slice(old);
        }
        Ok(())
    }

    /// A transfer has ended: checks its bytes, which from now on stay as they are.
    pub(super) fn end(&mut self, flight: u64, left: Left) -> Check {
        if !self.load() {
            return Ok(());
        }
        let ended: Vec<Claim> =
            self.claims.extract_if(.., |claim| claim.flight == flight).collect();
        ended.iter().try_for_each(|claim| self.settle(claim, left, true))
    }

    /// The transfer's bytes have all come.
    pub(super) fn has_come(&mut self, flight: u64) -> Check {
        if !self.load() {
            return Ok(());
        }
        let of = |claim: &&Claim| claim.flight == flight;
        let claims: Vec<Claim> = self.claims.iter().filter(of).copied().collect();
        claims.iter().try_for_each(|claim| self.settle(claim, Left::New, false))
    }
}

/// Memory that an engine's transfers read from.
pub(super) struct Source {
    pub(super) region: Option<Region>,
    bytes: usize,
    claims: Vec<Claim>,
}

impl Source {
    pub(super) const fn new(bytes: usize) -> Self {
        Self { region: None, bytes, claims: Vec::new() }
    }

    pub(super) fn open(&mut self, engine: &TransferEngine) -> Result<(), RegisterError> {
        if self.region.is_none() {
            self.region = Some(engine.alloc(self.bytes)?);
        }
        Ok(())
    }

    pub(super) fn in_use(&self) -> bool {
        !self.claims.is_empty()
    }

    pub(super) fn is_read_by(&self, flight: u64) -> bool {
        self.claims.iter().any(|claim| claim.flight == flight)
    }

    pub(super) const fn len(&self) -> u64 {
        self.bytes as u64
    }

    pub(super) fn is_free(&self, start: u64, len: u64) -> bool {
        start.saturating_add(len) <= self.len()
            && !self.claims.iter().any(|claim| claim.overlaps(start, len))
    }

    /// Puts a write's bytes there, until its end.
    pub(super) fn claim(&mut self, claim: Claim) {
        self.fill(&claim, claim.salt);
        if claim.len > 0 {
            self.claims.push(claim);
        }
    }

    fn fill(&self, claim: &Claim, salt: u64) {
        let mut bytes = vec![0; usize::try_from(claim.len).unwrap_or(0)];
        pattern(salt, &mut bytes);
        if let Some(region) = &self.region {
            // Claims lie inside: whoever claims asks `is_free` first.
            let _ = region.write(claim.start, &bytes);
        }
    }

    /// The transfer has ended: its source is written over at once, so that whoever still reads it is
    /// found out.
    pub(super) fn end(&mut self, flight: u64) {
        let ended: Vec<Claim> =
            self.claims.extract_if(.., |claim| claim.flight == flight).collect();
        for claim in ended {
            self.fill(&claim, !claim.salt);
        }
    }
}
