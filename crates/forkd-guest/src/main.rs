//! `forkd-guest`: PID 1 of a guest. All of it is in the library.

fn main() {
    if std::process::id() != 1 {
        eprintln!(
            "forkd-guest {}: the init and agent of forkd guests. The kernel starts it as PID 1 from \
             forkd's initramfs; there is nothing to do here.",
            env!("CARGO_PKG_VERSION")
        );
        std::process::exit(2);
    }
    forkd_guest::init::run()
}
