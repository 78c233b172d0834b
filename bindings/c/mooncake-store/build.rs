//! Names the shared library for the dynamic loader: programs that link it look for `libmooncake_store.so.0`.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmooncake_store.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
