//! The jail, from inside: each case runs in a process of its own, which jails itself and tries.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::process::Command;

use forkd_vmm::jail::{self, JailIds};

const CASE: &str = "FORKD_JAIL_CASE";

const TESTS: [(&str, fn()); 2] = [
    ("nobody_in_the_jail_gets_a_user_namespace", nobody_in_the_jail_gets_a_user_namespace),
    ("no_path_leads_anywhere_in_the_jail", no_path_leads_anywhere_in_the_jail),
];

fn main() {
    if let Ok(case) = std::env::var(CASE) {
        jail::enter(Some(JailIds { uid: 23456, gid: 34567 })).unwrap();
        return run_case(&case);
    }
    for (name, test) in TESTS {
        if !rustix::process::geteuid().is_root() {
            support::not_run(name, "needs root");
            continue;
        }
        test();
        println!("test {name} ... ok");
    }
}

/// The output of `case` in a jailed process.
fn said(case: &str) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // The jail closes what is above 3.
    support::pass_as_3(&mut command, std::fs::File::open("/dev/null").unwrap());
    let output = command.env(CASE, case).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{case}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text.trim().to_owned()
}

fn run_case(case: &str) {
    // SAFETY: the calls take integers and pointers to values that live through them; a process made by
    // accident ends at once.
    let result = unsafe {
        match case {
            "nothing" => 0,
            "unshare" => libc::unshare(libc::CLONE_NEWUSER).into(),
            "clone3" => {
                let mut arguments = [0u64; 8];
                arguments[0] = libc::CLONE_NEWUSER as u64;
                let made = libc::syscall(libc::SYS_clone3, arguments.as_ptr(), size_of_val(&arguments));
                if made == 0 {
                    libc::_exit(0);
                }
                made
            }
            "root" => libc::open(c"/".as_ptr(), libc::O_RDONLY).into(),
            "parent" => libc::open(c"/../proc".as_ptr(), libc::O_RDONLY).into(),
            "create" => libc::mkdir(c"/new".as_ptr(), 0o777).into(),
            _ => panic!("no case {case}"),
        }
    };
    let error = std::io::Error::last_os_error().raw_os_error();
    println!("{}", if result >= 0 { 0 } else { error.unwrap_or(-1) });
}

fn nobody_in_the_jail_gets_a_user_namespace() {
    assert_eq!(said("nothing"), "0");
    // What the kernel answers a process in a chroot: not the answer of a host that allows none.
    for case in ["unshare", "clone3"] {
        assert_eq!(said(case), libc::EPERM.to_string(), "{case}");
    }
}

fn no_path_leads_anywhere_in_the_jail() {
    for case in ["root", "parent", "create"] {
        assert_eq!(said(case), libc::EACCES.to_string(), "{case}");
    }
}
