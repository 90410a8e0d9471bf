//! QEMU's command line, and the addresses and paths in its machine.
//!
//! The emulated CPU has virtualization, so that `/dev/kvm` in the machine is real. It has one CPU in one
//! thread: machines with two hung in tests.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use anyhow::{Context, Result};
use forkd_protocol::init::{InitPlan, InterfacePlan, ListenPlan, MountPlan, RootPlan};

use super::state::{Folder, Plan};

/// The host's data directory in the machine, read-only.
pub(crate) const SHARE: &str = "/forkd-share";
/// The mount point of the machine's own disk: the data directory of its daemon.
pub(crate) const MACHINE_DATA: &str = "/var/lib/forkd-machine";
/// The port of the agent in the machine.
const AGENT_PORT: u16 = 1024;
/// The port of the daemon, in the machine and, if free, on the host.
pub(crate) const REST_PORT: u16 = 8889;
/// The machine's address in QEMU's user network.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The host's address in that network: forwarded connections come from it.
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// Ports on the host's loopback that lead into the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ports {
    pub(super) agent: u16,
    pub(super) rest: u16,
}

impl Ports {
    /// Free ports. If another process takes one before QEMU does, QEMU ends at once.
    pub(super) fn choose() -> Result<Self> {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let any = || bind(0).context("no free port on 127.0.0.1");
        let agent = any()?;
        let rest = bind(REST_PORT).or_else(|_| any())?;
        Ok(Ports { agent: agent.local_addr()?.port(), rest: rest.local_addr()?.port() })
    }
}

/// The arguments of QEMU.
pub(super) fn arguments(plan: &Plan, folder: &Folder, share: &Path, ports: Ports) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |option: &str, value: OsString| {
        arguments.push(option.into());
        arguments.push(value);
    };
    add("-name", "forkd-machine".into());
    add("-machine", "q35".into());
    add("-accel", "tcg,thread=single".into());
    add("-cpu", "max".into());
    add("-smp", "1".into());
    add("-m", plan.memory_mib.to_string().into());
    add("-display", "none".into());
    add("-vga", "none".into());
    add("-serial", "stdio".into());
    add("-monitor", "none".into());
    add("-kernel", plan.kernel.clone().into());
    add("-initrd", folder.initramfs().into());
    add("-append", "console=ttyS0 quiet panic=-1 mitigations=off".into());
    // QEMU itself exports it read-only: otherwise root in the machine could remount it for writing.
    add(
        "-virtfs",
        with_path(
            "local,path=",
            Path::new("/"),
            ",mount_tag=root,security_model=none,multidevs=remap,readonly=on",
        ),
    );
    add(
        "-virtfs",
        with_path("local,path=", share, ",mount_tag=share,security_model=none,multidevs=remap,readonly=on"),
    );
    // The host writes back lazily, but a flush in the machine is an fdatasync on the host: durable
    // data of the machine survives a power-off.
    add(
        "-drive",
        with_path("if=none,id=data,format=raw,cache=writeback,discard=unmap,file=", &folder.disk(), ""),
    );
    add("-device", "virtio-blk-pci,drive=data".into());
    let forward = |outside: u16, inside: u16| format!("hostfwd=tcp:127.0.0.1:{outside}-{ADDRESS}:{inside}");
    add(
        "-netdev",
        format!("user,id=net,{},{}", forward(ports.agent, AGENT_PORT), forward(ports.rest, REST_PORT)).into(),
    );
    add("-device", "virtio-net-pci,netdev=net,romfile=".into());
    arguments.push("-no-reboot".into());
    arguments.push("-no-user-config".into());
    arguments
}

/// A path in a QEMU option; commas are doubled, because a single comma ends a value.
fn with_path(before: &str, path: &Path, after: &str) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut value = before.as_bytes().to_vec();
    for &byte in path.as_os_str().as_bytes() {
        value.push(byte);
        if byte == b',' {
            value.push(byte);
        }
    }
    value.extend_from_slice(after.as_bytes());
    OsString::from_vec(value)
}

/// The plan of the machine's init.
pub(crate) fn init_plan(agent_token: &str) -> InitPlan {
    let mount = |source: &str, target: &str, fstype: &str, options: &str| MountPlan {
        source: source.into(),
        target: target.into(),
        fstype: fstype.into(),
        options: options.into(),
    };
    const P9: &str = "trans=virtio,version=9p2000.L,msize=512000,ro";
    InitPlan {
        modules: Vec::new(),
        // The host's own files. `loose` caches for ever: an order of magnitude faster, and right for
        // a root that is not upgraded under a running machine.
        root: RootPlan::Overlay { lower: mount("root", "/", "9p", &format!("{P9},cache=loose")) },
        mounts: vec![
            mount("tmpfs", "/run", "tmpfs", "mode=0755,nosuid,nodev"),
            mount("tmpfs", "/tmp", "tmpfs", "mode=1777,nosuid,nodev"),
            mount("cgroup2", "/sys/fs/cgroup", "cgroup2", ""),
            // Images and programs change while the machine runs, so this mount does not cache.
            mount("share", SHARE, "9p", &format!("{P9},cache=none")),
            mount("/dev/vda", MACHINE_DATA, "ext4", "noatime"),
        ],
        hostname: "forkd-machine".into(),
        network: vec![InterfacePlan {
            name: "eth0".into(),
            address: format!("{ADDRESS}/24"),
            gateway: Some(GATEWAY.to_string()),
        }],
        name_servers: Vec::new(),
        listen: ListenPlan::Tcp { port: AGENT_PORT, token: agent_token.to_owned() },
        line_port: None,
        default_user: Some("root".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::Build;
    use super::*;

    fn line(share: &str) -> Vec<String> {
        let plan = Plan {
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            kernel: "/k/vmlinuz".into(),
            memory_mib: 4096,
            agent_token: "secret-of-the-agent".into(),
            build: Build { id: "1".into(), boot: "2".into(), seen: "3".into() },
            watchdog_secs: 120,
        };
        let folder = Folder::new(Path::new(share).join("machine"));
        let ports = Ports { agent: 40000, rest: 8889 };
        let arguments = arguments(&plan, &folder, Path::new(share), ports);
        arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    #[test]
    fn nothing_of_this_computer_can_be_written_but_the_disk() {
        let line = line("/data");
        let shares: Vec<_> = line.iter().filter(|argument| argument.starts_with("local,")).collect();
        assert_eq!(shares.len(), 2);
        assert!(shares.iter().all(|share| share.ends_with("readonly=on")));
        assert!(
            line.contains(
                &"if=none,id=data,format=raw,cache=writeback,discard=unmap,file=/data/machine/data.img"
                    .to_owned()
            )
        );
    }

    #[test]
    fn the_machine_is_reached_only_from_loopback() {
        let network = line("/data").into_iter().find(|argument| argument.starts_with("user,")).unwrap();
        assert_eq!(
            network,
            "user,id=net,hostfwd=tcp:127.0.0.1:40000-10.0.2.15:1024,hostfwd=tcp:127.0.0.1:8889-10.0.2.15:8889"
        );
    }

    #[test]
    fn a_comma_in_a_path_does_not_become_an_option() {
        let line = line("/a,readonly=off");
        assert!(
            line.iter().any(|argument| argument.starts_with("local,path=/a,,readonly=off,mount_tag=share,"))
        );
    }

    #[test]
    fn secrets_are_not_on_the_command_line_where_everybody_sees_them() {
        assert!(!line("/data").iter().any(|argument| argument.contains("secret-of-the-agent")));
    }

    #[test]
    fn ports_chosen_are_free_and_different() {
        let ports = Ports::choose().unwrap();
        assert_ne!(ports.agent, ports.rest);
    }
}
