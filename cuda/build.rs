//! Compiles the kernels, if there is a compiler for them.
//!
//! `IMMWIRE_NVCC` names an nvcc, and then it must work; `none` stands for none. Unset, the one of `CUDA_HOME`,
//! `CUDA_PATH` or `PATH` is tried; if it fails, or there is none, the crate is built without kernels, and says so when
//! they are asked for. `cuda/toolchain` fetches a compiler.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "kernels/copy.cu";
const HEADER: &str = "kernels/immwire_cuda.h";

/// Code for Ampere and Hopper, and for later GPUs text that their driver compiles.
const TARGETS: [&str; 3] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_90,code=compute_90",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in ["build.rs", SOURCE, HEADER] {
        println!("cargo::rerun-if-changed={file}");
    }
    for variable in ["IMMWIRE_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let image = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?).join("kernels.fatbin");
    match env::var_os("IMMWIRE_NVCC") {
        Some(none) if none == "none" => fs::write(&image, [])?,
        Some(named) => compile(&named.into(), &image)?,
        None => match found() {
            None => fs::write(&image, [])?,
            Some(nvcc) => {
                if let Err(why) = compile(&nvcc, &image) {
                    println!("cargo::warning=built without GPU kernels: {why}");
                    fs::write(&image, [])?;
                }
            }
        },
    }
    Ok(())
}

fn found() -> Option<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let folders = toolkits.map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    folders.chain(env::split_paths(&path)).map(|f| f.join("nvcc")).find(|nvcc| nvcc.is_file())
}

fn compile(nvcc: &PathBuf, image: &PathBuf) -> Result<(), Box<dyn Error>> {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-Werror", "all-warnings"]);
    command.args(["-Xfatbin", "-compress-all"]);
    for target in TARGETS {
        command.args(["-gencode", target]);
    }
    let output = command.arg(SOURCE).arg("-o").arg(image).output();
    let output = output.map_err(|e| format!("{}: {e}", nvcc.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        return Err(format!("{} cannot compile {SOURCE}: {said}", nvcc.display()).into());
    }
    Ok(())
}
