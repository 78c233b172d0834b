//! Names the shared library for the dynamic loader: programs that link it look for `libsnowskin.so.0`.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libsnowskin.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
