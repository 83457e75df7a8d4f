//! Tells the module which cargo profile it is built with.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let profile = std::env::var("PROFILE").unwrap_or_default();
    println!("cargo:rustc-env=ONELOOP_BUILD_PROFILE={profile}");
}
