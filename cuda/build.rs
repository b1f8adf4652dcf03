//! Compiles the kernels, if there is a compiler for them.
//!
//! `IMMWIRE_NVCC` names an nvcc, and then it must work; `none` stands for none. Unset, the one of `CUDA_HOME`,
//! `CUDA_PATH` or `PATH` is tried; if it fails, or there is none, the crate is built without kernels, and says so when
//! they are asked for, and why. `cuda/toolchain` fetches a compiler. `IMMWIRE_NVCC_FLAGS` are given to nvcc behind our own.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "src/targets.rs"]
mod targets;

use targets::{IMAGES, Target};

/// Names the variable of further flags for nvcc.
const FLAGS: &str = "IMMWIRE_NVCC_FLAGS";
/// Of what a compiler has to say, so many characters are kept for who asks for kernels.
const KEPT_CHARACTERS: usize = 600;

const HEADERS: [&str; 3] = ["immwire_cuda.h", "immwire_moe.h", "machine.cuh"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/targets.rs");
    for (source, _) in IMAGES {
        println!("cargo::rerun-if-changed=kernels/{source}.cu");
    }
    for header in HEADERS {
        println!("cargo::rerun-if-changed=kernels/{header}");
    }
    println!("cargo::rerun-if-env-changed=IMMWIRE_NVCC");
    println!("cargo::rerun-if-env-changed={FLAGS}");
    let folder = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    let named = env::var_os("IMMWIRE_NVCC");
    if named.is_none() {
        // Only then: a path is another one already if a command runs cargo for its caller.
        for variable in ["CUDA_HOME", "CUDA_PATH", "PATH"] {
            println!("cargo::rerun-if-env-changed={variable}");
        }
    }
    // Until there is a reason.
    fs::write(folder.join("compiler_failed.txt"), [])?;
    match named {
        Some(none) if none == "none" => leave_empty(&folder)?,
        Some(named) => compile(Path::new(&named), &folder)?,
        None => match found() {
            None => {
                println!(
                    "cargo::warning=built without GPU kernels: no nvcc in CUDA_HOME, CUDA_PATH or PATH; cuda/toolchain fetches one, for \
                     IMMWIRE_NVCC"
                );
                leave_empty(&folder)?;
            }
            Some(nvcc) => {
                if let Err(why) = compile(&nvcc, &folder) {
                    println!("cargo::warning=built without GPU kernels: {why}");
                    let kept: String = why.to_string().chars().take(KEPT_CHARACTERS).collect();
                    fs::write(folder.join("compiler_failed.txt"), kept)?;
                    // Another in its place is tried.
                    println!("cargo::rerun-if-changed={}", nvcc.display());
                    leave_empty(&folder)?;
                }
            }
        },
    }
    Ok(())
}

fn image(folder: &Path, source: &str) -> PathBuf {
    folder.join(source).with_extension("fatbin")
}

fn leave_empty(folder: &Path) -> std::io::Result<()> {
    IMAGES.iter().try_for_each(|(source, _)| fs::write(image(folder, source), []))
}

fn found() -> Option<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let folders = toolkits.map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    folders.chain(env::split_paths(&path)).map(|f| f.join("nvcc")).find(|nvcc| nvcc.is_file())
}

fn compile(nvcc: &Path, folder: &Path) -> Result<(), Box<dyn Error>> {
    let compile = |&(source, targets): &(&str, &[Target])| {
        compile_one(nvcc, source, targets, &image(folder, source))
    };
    IMAGES.iter().try_for_each(compile)
}

fn compile_one(
    nvcc: &Path,
    name: &str,
    targets: &[Target],
    image: &Path,
) -> Result<(), Box<dyn Error>> {
    let source = format!("kernels/{name}.cu");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-Werror", "all-warnings"]);
    command.args(env::var(FLAGS).unwrap_or_default().split_whitespace());
    // One for each target, at once.
    command.args(["--threads", "0"]);
    command.args(["-Xfatbin", "-compress-all"]);
    for target in targets {
        command.args(["-gencode", &target.to_string()]);
    }
    let output = command.arg(&source).arg("-o").arg(image).output();
    let output = output.map_err(|e| format!("{}: {e}", nvcc.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        let nvcc = nvcc.display();
        return Err(format!("{nvcc} cannot compile {source} ({}): {said}", output.status).into());
    }
    Ok(())
}
