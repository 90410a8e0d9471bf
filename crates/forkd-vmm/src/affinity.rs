//! Which of the host's CPUs a thread runs on, and going to where another ran.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The CPU the calling thread runs on just now.
pub(crate) fn current() -> usize {
    // The C library's: others look for the kernel's fast way with calls that vCPU threads may not make.
    // SAFETY: the call takes nothing and gives a number.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(usize::MAX)
}

/// Takes the calling thread to `cpu`, in whose caches is what another thread has just used there. The
/// scheduler is free to take it elsewhere afterwards, and nothing is lost where it cannot be taken there.
pub(crate) fn move_to(cpu: usize) {
    if cpu == current() || cpu >= CpuSet::MAX_CPU {
        return;
    }
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut only = CpuSet::new();
    only.set(cpu);
    if sched_setaffinity(None, &only).is_ok() {
        let _ = sched_setaffinity(None, &allowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_goes_where_it_is_told_and_may_go_on_from_there() {
        let before = sched_getaffinity(None).unwrap();
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| before.is_set(*cpu)).collect();
        for cpu in allowed {
            let arrives = || {
                move_to(cpu);
                current() == cpu
            };
            // The scheduler may take it elsewhere at once, but not every time.
            assert!((0..1000).any(|_| arrives()), "never got to {cpu}");
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        }
        // None of these is there.
        move_to(CpuSet::MAX_CPU - 1);
        move_to(usize::MAX);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
