//! The plan that init follows: the builder of an initramfs puts it there for the guest side.

use serde::{Deserialize, Serialize};

use crate::agent::AGENT_PORT;

/// The steps of an initramfs's init, read from `/forkd/init.json` there. The same binary starts a guest and
/// the emulated machine; only this plan differs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InitPlan {
    /// Modules to load, in this order: file names under `/forkd/modules`.
    pub modules: Vec<String>,
    /// The root file system to switch to.
    pub root: RootPlan,
    /// More file systems, mounted in this order under the new root. A missing mount point is made.
    pub mounts: Vec<MountPlan>,
    /// Host name at boot.
    pub hostname: String,
    /// Interfaces to configure, if they exist. `lo` always is.
    pub network: Vec<InterfacePlan>,
    /// Addresses of name servers, written to `/etc/resolv.conf`; none leaves the image's own.
    pub name_servers: Vec<String>,
    /// Where the agent listens.
    pub listen: ListenPlan,
    /// The TCP port of the [JSON-lines protocol](crate::json_lines); none leaves it out.
    pub line_port: Option<u16>,
    /// User commands run as when the caller names none.
    pub default_user: Option<String>,
}

/// Where the root file system comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RootPlan {
    /// A disk.
    Disk {
        /// Such as `/dev/vda`.
        device: String,
        /// Such as `ext4`.
        fstype: String,
        /// Mounted read-only.
        read_only: bool,
    },
    /// A read-only file system under a writable layer in memory.
    Overlay {
        /// What to mount below.
        lower: MountPlan,
    },
}

impl Default for RootPlan {
    fn default() -> Self {
        RootPlan::Disk { device: "/dev/vda".into(), fstype: "ext4".into(), read_only: false }
    }
}

/// One mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MountPlan {
    /// Device, tag or name.
    pub source: String,
    /// Where, under the new root.
    pub target: String,
    /// File system type.
    pub fstype: String,
    /// Options as `mount -o` takes them, `ro` among them.
    pub options: String,
}

/// One network interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InterfacePlan {
    /// Such as `eth0`.
    pub name: String,
    /// Such as `10.42.0.2/24`.
    pub address: String,
    /// Default gateway.
    pub gateway: Option<String>,
}

/// Where the agent listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenPlan {
    /// On a vsock port: only the monitor can reach it.
    Vsock {
        /// The port, normally [`AGENT_PORT`].
        port: u32,
    },
    /// On all addresses of a TCP port; every request but `/health` must carry the token.
    Tcp {
        /// The port.
        port: u16,
        /// The token.
        token: String,
    },
}

impl Default for ListenPlan {
    fn default() -> Self {
        ListenPlan::Vsock { port: AGENT_PORT }
    }
}
