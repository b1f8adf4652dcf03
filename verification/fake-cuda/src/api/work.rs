//! Streams, events, kernels, and what is enqueued.

use super::{Out, calls};
use crate::code;
use crate::kernel::{Kernel, Launch, Size};
use crate::reach::{Host, Reach};
use crate::stream::{Event, Until, Work};
use crate::violation::broken;
use crate::world::{CAPTURE_MODE, Capture, Function, Module, RELAXED, begin};
use cudarc::driver::sys as cu;
use immwire_cuda::geometry::BULK_SHARED_BYTES;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a kernel may have of dynamic shared memory without asking.
const SHARED_BYTES: u32 = 48 << 10;

calls! {
    fn cuStreamCreate(stream: Out<u64>, flags: c_uint) {
        let mut world = begin("cuStreamCreate");
        let current = world.current("cuStreamCreate");
        stream.is_there()?;
        if flags > cu::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint {
            return Err(code::INVALID_VALUE);
        }
        let (handle, made) = (world.handle(), world.start(current));
        world.streams.insert(handle, made);
        stream.put(handle)
    }

    /// What is enqueued goes on.
    fn cuStreamDestroy_v2(stream: u64) {
        let mut world = begin("cuStreamDestroy");
        let there = world.any_stream("cuStreamDestroy", stream);
        if world.streams.remove(&stream).is_none() {
            return Err(code::INVALID_HANDLE);
        }
        world.captures.remove(&stream);
        world.close(&there);
        Ok(())
    }

    fn cuStreamQuery(stream: u64) {
        let stream = begin("cuStreamQuery").any_stream("cuStreamQuery", stream);
        if stream.is_captured() {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        if stream.has_done(stream.enqueued()) { Ok(()) } else { Err(code::NOT_READY) }
    }

    fn cuStreamIsCapturing(stream: u64, status: Out<c_uint>) {
        use cu::CUstreamCaptureStatus as S;
        let stream = begin("cuStreamIsCapturing").any_stream("cuStreamIsCapturing", stream);
        let active = stream.is_captured();
        let is = if active { S::CU_STREAM_CAPTURE_STATUS_ACTIVE } else { S::CU_STREAM_CAPTURE_STATUS_NONE };
        status.put(is as c_uint)
    }

    /// From here on nothing of the stream's is done. What is captured is counted, and cannot be launched.
    fn cuStreamBeginCapture_v2(stream: u64, mode: c_uint) {
        let mut world = begin("cuStreamBeginCapture");
        let there = world.stream("cuStreamBeginCapture", stream);
        if mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        if there.is_captured() || !world.streams.contains_key(&stream) {
            return Err(code::ILLEGAL_STATE);
        }
        there.begin_capture();
        world.captures.insert(stream, Capture { mode, thread: std::thread::current().id() });
        Ok(())
    }

    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) {
        let mut world = begin("cuStreamEndCapture");
        let there = world.any_stream("cuStreamEndCapture", stream);
        graph.is_there()?;
        let capture = world.captures.get(&stream).ok_or(code::ILLEGAL_STATE)?;
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        world.captures.remove(&stream);
        let handle = world.handle();
        world.graphs.insert(handle, there.end_capture());
        graph.put(handle)
    }

    /// How many; not which.
    fn cuGraphGetNodes(graph: u64, nodes: *mut c_void, count: Out<usize>) {
        let world = begin("cuGraphGetNodes");
        if !nodes.is_null() {
            broken!(NotModelled, "cuGraphGetNodes: the nodes themselves");
        }
        match world.graphs.get(&graph) {
            Some(there) => count.put(*there),
            None => broken!(Handle, "cuGraphGetNodes: graph {graph:#x}"),
        }
    }

    fn cuGraphDestroy(graph: u64) {
        if begin("cuGraphDestroy").graphs.remove(&graph).is_none() {
            broken!(Handle, "cuGraphDestroy: graph {graph:#x}");
        }
        Ok(())
    }

    /// Of this thread; what was, comes back.
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        drop(begin("cuThreadExchangeStreamCaptureMode"));
        // SAFETY: null, or a number of the caller's.
        let Some(mode) = (unsafe { mode.as_mut() }) else { return Err(code::INVALID_VALUE) };
        if *mode > RELAXED {
            return Err(code::INVALID_VALUE);
        }
        *mode = CAPTURE_MODE.replace(*mode);
        Ok(())
    }

    fn cuStreamSynchronize(stream: u64) {
        let stream = begin("cuStreamSynchronize").any_stream("cuStreamSynchronize", stream);
        if stream.is_captured() {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.wait(stream.enqueued());
        Ok(())
    }

    fn cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) {
        let mut world = begin("cuStreamWaitEvent");
        let (stream, event) =
            (world.stream("cuStreamWaitEvent", stream), world.event("cuStreamWaitEvent", event));
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if event.captured.load(Ordering::Relaxed) && !stream.is_captured() {
            broken!(Captured, "cuStreamWaitEvent: the stream would be drawn into the graph of the event");
        }
        if let Some((other, ticket)) = event.recorded() {
            stream.push(Work::After { stream: other, ticket });
        }
        Ok(())
    }

    fn cuStreamWaitValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint) {
        use cu::CUstreamWaitValue_flags as F;
        let mut world = begin("cuStreamWaitValue64");
        let stream = world.stream("cuStreamWaitValue64", stream);
        world.take_command()?;
        let is = |flag: F| flags == flag as c_uint;
        let until = if is(F::CU_STREAM_WAIT_VALUE_GEQ) {
            Until::GreaterOrEqual
        } else if is(F::CU_STREAM_WAIT_VALUE_EQ) {
            Until::Equal
        } else if is(F::CU_STREAM_WAIT_VALUE_AND) {
            Until::And
        } else if is(F::CU_STREAM_WAIT_VALUE_NOR) {
            Until::Nor
        } else {
            return Err(code::NOT_SUPPORTED);
        };
        let mut reach = Reach::new(stream.gpu);
        reach.claim_words(&world.memory, address, (8, 1), false, "word");
        stream.push(Work::Await { reach, word: address, value, until });
        Ok(())
    }

    fn cuStreamWriteValue64_v2(stream: u64, address: u64, value: u64, flags: c_uint) {
        let mut world = begin("cuStreamWriteValue64");
        let stream = world.stream("cuStreamWriteValue64", stream);
        world.take_command()?;
        if flags > cu::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER as c_uint {
            return Err(code::INVALID_VALUE);
        }
        let mut reach = Reach::new(stream.gpu);
        reach.claim_words(&world.memory, address, (8, 1), true, "word");
        stream.push(Work::Write { reach, word: address, value });
        Ok(())
    }

    fn cuLaunchHostFunc(stream: u64, function: cu::CUhostFn, data: *mut c_void) {
        let mut world = begin("cuLaunchHostFunc");
        let stream = world.stream("cuLaunchHostFunc", stream);
        let function = function.ok_or(code::INVALID_VALUE)?;
        stream.push(Work::Call { function, data: data as usize });
        Ok(())
    }

    /// With plain host memory on one side it returns when that is not used any more.
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        let mut world = begin("cuMemcpyAsync");
        let stream = world.stream("cuMemcpyAsync", stream);
        world.take_command()?;
        let (mut reach, bytes) = (Reach::new(stream.gpu), bytes as u64);
        if [from, to].into_iter().any(|side| world.memory.is_cut(side, bytes)) {
            return Err(code::INVALID_VALUE);
        }
        let (host, plain, known) = match [from, to].map(|side| world.memory.at(side).is_some()) {
            [false, true] => (Host::Source, from, to),
            [true, false] => (Host::Target, to, from),
            _ => {
                reach.claim(&world.memory, from, bytes, false, "source");
                reach.claim(&world.memory, to, bytes, true, "target");
                stream.push(Work::Copy { reach, to, from, bytes });
                return Ok(());
            }
        };
        reach.claim(&world.memory, known, bytes, host == Host::Source, "other side of a copy");
        let ticket = stream.push(Work::CopyPlain { reach, host, plain, known, bytes });
        drop(world);
        stream.wait(ticket);
        Ok(())
    }

    fn cuMemsetD8Async(at: u64, byte: u8, bytes: usize, stream: u64) {
        let mut world = begin("cuMemsetD8Async");
        let stream = world.stream("cuMemsetD8Async", stream);
        world.take_memory()?;
        let (mut reach, bytes) = (Reach::new(stream.gpu), bytes as u64);
        reach.claim(&world.memory, at, bytes, true, "target");
        stream.push(Work::Fill { reach, at, byte, bytes });
        Ok(())
    }

    fn cuEventCreate(event: Out<u64>, flags: c_uint) {
        let mut world = begin("cuEventCreate");
        let current = world.current("cuEventCreate");
        event.is_there()?;
        let untimed = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        let blocking = cu::CUevent_flags::CU_EVENT_BLOCKING_SYNC as c_uint;
        if flags & !(untimed | blocking) != 0 {
            return Err(code::NOT_SUPPORTED);
        }
        let handle = world.handle();
        world.events.insert(handle, Event::new(current.context, flags & untimed == 0));
        event.put(handle)
    }

    fn cuEventDestroy_v2(event: u64) {
        let mut world = begin("cuEventDestroy");
        world.event("cuEventDestroy", event);
        world.events.remove(&event);
        Ok(())
    }

    fn cuEventRecord(event: u64, stream: u64) {
        let mut world = begin("cuEventRecord");
        let (stream, event) =
            (world.stream("cuEventRecord", stream), world.event("cuEventRecord", event));
        if event.context != stream.context {
            broken!(
                WrongContext,
                "cuEventRecord: the stream is of GPU {}'s, the event is not",
                stream.gpu
            );
        }
        event.record(&stream);
        Ok(())
    }

    fn cuEventQuery(event: u64) {
        let event = begin("cuEventQuery").event("cuEventQuery", event);
        if event.captured.load(Ordering::Relaxed) {
            return Err(code::CAPTURED_EVENT);
        }
        match event.recorded() {
            Some((stream, ticket)) if !stream.has_done(ticket) => Err(code::NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) {
        let world = begin("cuEventElapsedTime");
        let [start, end] = [start, end].map(|event| world.event("cuEventElapsedTime", event));
        let mut times = [None; 2];
        for (event, time) in [&start, &end].into_iter().zip(&mut times) {
            let (stream, ticket) =
                event.recorded().filter(|_| event.timed).ok_or(code::INVALID_HANDLE)?;
            if !stream.has_done(ticket) {
                return Err(code::NOT_READY);
            }
            *time = event.when();
        }
        let [Some(start), Some(end)] = times else { return Err(code::NOT_READY) };
        let seconds = |later: std::time::Instant, earlier| {
            later.saturating_duration_since(earlier).as_secs_f32()
        };
        milliseconds.put(1e3 * (seconds(end, start) - seconds(start, end)))
    }

    /// Any image will do: the kernels are this library's own.
    fn cuModuleLoadData(module: Out<u64>, image: *const c_void) {
        let mut world = begin("cuModuleLoadData");
        let current = world.current("cuModuleLoadData");
        module.is_there()?;
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let handle = world.handle();
        world.modules.insert(handle, Arc::new(Module { context: current.context }));
        module.put(handle)
    }

    fn cuModuleUnload(module: u64) {
        let mut world = begin("cuModuleUnload");
        world.current("cuModuleUnload");
        world.unload("cuModuleUnload", module);
        Ok(())
    }

    fn cuModuleGetFunction(function: Out<u64>, module: u64, name: *const c_char) {
        let mut world = begin("cuModuleGetFunction");
        world.module("cuModuleGetFunction", module);
        function.is_there()?;
        if name.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: not null, so a text with its zero: the caller's promise.
        let kernel =
            Kernel::named(unsafe { CStr::from_ptr(name) }.to_bytes()).ok_or(code::NOT_FOUND)?;
        let handle = world.handle();
        world
            .functions
            .insert(handle, Function { module, kernel, most_shared_bytes: SHARED_BYTES });
        function.put(handle)
    }

    fn cuFuncSetAttribute(function: u64, attribute: c_uint, value: c_int) {
        let most =
            cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_uint;
        let mut world = begin("cuFuncSetAttribute");
        let function = world.function("cuFuncSetAttribute", function);
        if attribute != most {
            broken!(NotModelled, "cuFuncSetAttribute {attribute}");
        }
        let value = u32::try_from(value).ok().filter(|&value| value <= BULK_SHARED_BYTES);
        function.most_shared_bytes = value.ok_or(code::INVALID_VALUE)?;
        Ok(())
    }

    fn cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: u64,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) {
        let size = Size {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
        };
        launch("cuLaunchKernel", function, size, stream, parameters, extra)
    }

    /// The only attribute is that it may begin before those before it in its stream have ended: here it never does.
    fn cuLaunchKernelEx(
        config: *const cu::CUlaunchConfig,
        function: u64,
        parameters: *const *const c_void,
        extra: *const *const c_void,
    ) {
        // SAFETY: the caller's promise, if it is not null.
        let config = unsafe { config.as_ref() }.ok_or(code::INVALID_VALUE)?;
        for at in 0..config.numAttrs as usize {
            // SAFETY: the caller's promise: so many are there.
            let attribute = unsafe { config.attrs.add(at).read() };
            let early = cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            if attribute.id != early {
                broken!(NotModelled, "cuLaunchKernelEx: attribute {:?}", attribute.id);
            }
        }
        let size = Size {
            grid: [config.gridDimX, config.gridDimY, config.gridDimZ],
            block: [config.blockDimX, config.blockDimY, config.blockDimZ],
            shared_bytes: config.sharedMemBytes,
        };
        launch("cuLaunchKernelEx", function, size, config.hStream as u64, parameters, extra)
    }
}

/// Enqueues a kernel, as the driver's `call`.
fn launch(
    call: &'static str,
    function: u64,
    size: Size,
    stream: u64,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> code::Answer {
    let mut world = begin(call);
    let stream = world.stream(call, stream);
    world.take_command()?;
    let &mut Function { module, kernel, most_shared_bytes } = world.function(call, function);
    let module = Arc::clone(world.module(call, module));
    if module.context != stream.context {
        broken!(WrongContext, "{call}: the stream is of GPU {}'s, the function is not", stream.gpu);
    }
    if parameters.is_null() || !extra.is_null() {
        broken!(NotModelled, "{call}: parameters other than by their addresses");
    }
    // SAFETY: the caller's promise.
    let launch = unsafe { Launch::read(kernel, size, parameters) };
    launch.check(size, most_shared_bytes);
    let mut reach = Reach::new(stream.gpu);
    launch.claim(&world, &mut reach);
    reach.module = Some(module);
    stream.push(Work::Launch { reach, launch });
    Ok(())
}
