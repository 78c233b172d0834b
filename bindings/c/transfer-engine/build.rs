//! Names the shared library for the dynamic loader: programs that link it look for `libtransfer_engine.so.0`.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libtransfer_engine.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
