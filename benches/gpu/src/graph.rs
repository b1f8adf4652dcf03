//! Work of a stream as a graph, to be launched again and again. Knows nothing of what the work is.

use crate::signals::{call, within};
use cudarc::driver::sys as cu;
use immwire_cuda::{Device, Stream};
use std::error::Error;
use std::ptr;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What was captured.
pub(crate) struct Graph {
    graph: cu::CUgraph,
    ready: cu::CUgraphExec,
}

impl Graph {
    /// Captures what `work` enqueues; all memory that it names has to outlive the launches.
    pub(crate) fn new(
        device: &Device,
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Outcome<()>,
    ) -> Outcome<Self> {
        let raw: cu::CUstream = stream.raw().cast();
        within(device, || {
            let (mut graph, mut ready) = (ptr::null_mut(), ptr::null_mut());
            let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: the stream is alive, and nobody else captures it; so below.
            call("cuStreamBeginCapture", unsafe { cu::cuStreamBeginCapture_v2(raw, mode) })?;
            let worked = work(stream);
            // SAFETY: writes the one handle.
            let ended = unsafe { cu::cuStreamEndCapture(raw, &raw mut graph) };
            worked?;
            call("cuStreamEndCapture", ended)?;
            // SAFETY: writes the one handle; the graph is alive.
            let made = unsafe { cu::cuGraphInstantiateWithFlags(&raw mut ready, graph, 0) };
            // From here on what there is is destroyed.
            let made_both = Self { graph, ready };
            call("cuGraphInstantiate", made)?;
            // SAFETY: both are alive.
            call("cuGraphUpload", unsafe { cu::cuGraphUpload(ready, raw) })?;
            Ok(made_both)
        })
    }

    pub(crate) fn launch(&self, device: &Device, stream: &Stream) -> Outcome<()> {
        within(device, || {
            // SAFETY: graph and stream are alive, and so is all memory that the graph names.
            call("cuGraphLaunch", unsafe { cu::cuGraphLaunch(self.ready, stream.raw().cast()) })
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed here only. Launches have been waited for, but where something failed: then the driver frees
        // what is under way when it has ended (`cuGraphExecDestroy`).
        unsafe {
            if !self.ready.is_null() {
                let _ = cu::cuGraphExecDestroy(self.ready);
            }
            let _ = cu::cuGraphDestroy(self.graph);
        }
    }
}
