//! Compiles the kernels for the CPU. Needs a C++ compiler, and nothing of CUDA.

fn main() {
    let kernels = "../../cuda/kernels";
    for file in ["emulate.cpp", "machine.h"] {
        println!("cargo::rerun-if-changed={file}");
    }
    for file in ["moe.cu", "immwire_moe.h"] {
        println!("cargo::rerun-if-changed={kernels}/{file}");
    }
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("emulate.cpp")
        .include(".")
        .include(kernels)
        // One rounding for each operation, as on a GPU.
        .flag("-ffp-contract=off")
        .opt_level(2)
        .warnings(true)
        .extra_warnings(true)
        // Its long jumps must not leave a stack.
        .flag("-U_FORTIFY_SOURCE")
        // CUDA's pragmas, and aggregates of fewer values.
        .flag("-Wno-unknown-pragmas")
        .flag("-Wno-missing-field-initializers")
        .flag("-Werror")
        .compile("immwire_moe_emulated");
}
