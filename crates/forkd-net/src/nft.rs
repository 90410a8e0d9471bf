//! Packet filter rules: what they are, and the program that loads them.
//!
//! There are two tables, both called `inet forkd`: one in every slot, the same in each, which knows
//! what a guest may send and where to; and one on the host, which knows that slots may go out and
//! nowhere else. A guest that reaches nothing it should not is stopped by each of them alone, except
//! for the host's own public addresses, which only the host's table knows.

use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::slot::{PREFIX, TAP, UPLINK};
use crate::{Error, GATEWAY_ADDRESS, GUEST_ADDRESS, Result};

/// The name of our tables.
pub(crate) const TABLE: &str = "inet forkd";

/// Where no guest may go: private, shared, link-local (which has the metadata services of clouds),
/// loopback, multicast, reserved.
const FORBIDDEN: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, \
                         172.16.0.0/12, 192.168.0.0/16, 224.0.0.0/3";

/// The rules of every slot.
///
/// Packets that connection tracking cannot place are not translated either: they would leave with the
/// guest's address, so they do not leave. The slot itself takes only answers: to what a program of the
/// host's that entered it asked the guest.
pub(crate) fn slot_rules(resolver: Option<Ipv4Addr>) -> String {
    let resolve = match resolver {
        Some(resolver) => format!(
            "iifname \"{TAP}\" ip daddr {GATEWAY_ADDRESS} udp dport 53 dnat ip to {resolver}
        iifname \"{TAP}\" ip daddr {GATEWAY_ADDRESS} tcp dport 53 dnat ip to {resolver}"
        ),
        None => String::new(),
    };
    format!(
        "table {TABLE} {{
    chain source {{
        type filter hook prerouting priority -300
        meta nfproto ipv6 drop
        iifname \"{TAP}\" ip saddr != {GUEST_ADDRESS} drop
    }}
    chain resolve {{
        type nat hook prerouting priority -100
        {resolve}
    }}
    chain reach {{
        type filter hook forward priority 0; policy drop
        ct state invalid drop
        iifname \"{UPLINK}\" oifname \"{TAP}\" ct state established,related accept
        iifname \"{TAP}\" oifname \"{UPLINK}\" ct status dnat accept
        iifname \"{TAP}\" ip daddr {{ {FORBIDDEN} }} drop
        iifname \"{TAP}\" oifname \"{UPLINK}\" accept
    }}
    chain gateway {{
        type filter hook input priority 0; policy drop
        iifname \"{TAP}\" ct state established accept
        iifname \"{TAP}\" ip daddr {GATEWAY_ADDRESS} icmp type echo-request accept
    }}
    chain translate {{
        type nat hook postrouting priority 100
        oifname \"{UPLINK}\" masquerade
    }}
}}
"
    )
}

/// The rules of the host, in place of those of an earlier daemon.
pub(crate) fn host_rules(outer: &str, resolver: Option<Ipv4Addr>) -> String {
    // A resolver that is this host itself.
    let resolve = match resolver {
        Some(resolver) => format!(
            "iifname \"{PREFIX}*\" ip daddr {resolver} udp dport 53 accept
        iifname \"{PREFIX}*\" ip daddr {resolver} tcp dport 53 accept"
        ),
        None => String::new(),
    };
    format!(
        "table {TABLE} {{
}}
delete table {TABLE}
table {TABLE} {{
    chain source {{
        type filter hook prerouting priority -300
        iifname \"{PREFIX}*\" meta nfproto ipv6 drop
        iifname \"{PREFIX}*\" ip saddr != {outer} drop
    }}
    chain host {{
        type filter hook input priority 0
        {resolve}
        iifname \"{PREFIX}*\" drop
    }}
    chain reach {{
        type filter hook forward priority 0
        iifname \"{PREFIX}*\" oifname \"{PREFIX}*\" drop
        oifname \"{PREFIX}*\" ct state established,related accept
        oifname \"{PREFIX}*\" drop
        iifname \"{PREFIX}*\" accept
    }}
    chain translate {{
        type nat hook postrouting priority 100
        ip saddr {outer} oifname != \"{PREFIX}*\" masquerade
    }}
}}
"
    )
}

/// The program that loads rules.
#[derive(Debug, Clone)]
pub(crate) struct Nft(PathBuf);

impl Nft {
    /// `None` if it is not installed.
    pub(crate) fn find() -> Option<Self> {
        // Daemons often have no sbin in their path, and that is where it lives.
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
            .map(|folder| folder.join("nft"))
            .find(|program| program.is_absolute() && program.is_file())
            .map(Nft)
    }

    /// Loads all the rules or none, in the calling thread's namespace.
    pub(crate) fn load(&self, rules: &str) -> Result<()> {
        let output = run(&self.0, &["-f", "-"], rules).map_err(|error| Error::Nft(error.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next().unwrap_or("it said nothing").to_owned();
        Err(Error::Nft(said))
    }

    /// Removes our table from the calling thread's namespace.
    pub(crate) fn remove_table(&self) -> Result<()> {
        self.load(&format!("table {TABLE} {{\n}}\ndelete table {TABLE}\n"))
    }

    /// Whether the calling thread's namespace has our table.
    pub(crate) fn has_table(&self) -> Result<bool> {
        let output = run(&self.0, &["list", "tables"], "").map_err(|error| Error::Nft(error.to_string()))?;
        let listed = String::from_utf8_lossy(&output.stdout);
        Ok(listed.lines().any(|line| line.trim() == format!("table {TABLE}")))
    }
}

fn run(program: &Path, arguments: &[&str], input: &str) -> std::io::Result<Output> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends without reading says why on stderr.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait_with_output()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESOLVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 53);

    fn position(rules: &str, line: &str) -> usize {
        rules.find(line).unwrap_or_else(|| panic!("no `{line}` in\n{rules}"))
    }

    #[test]
    fn forbidden_ranges_are_dropped_before_anything_is_let_out_but_dns() {
        let rules = slot_rules(Some(RESOLVER));
        let dns = position(&rules, "ct status dnat accept");
        let forbidden = position(
            &rules,
            "ip daddr { 0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16, 224.0.0.0/3 } drop",
        );
        let out = position(&rules, "iifname \"tap0\" oifname \"uplink\" accept");
        assert!(dns < forbidden && forbidden < out);
        // What is translated and not DNS would pass the first of them.
        assert_eq!(rules.matches("dnat ip to").count(), 2);
        assert_eq!(rules.matches("dport 53 dnat ip to 192.0.2.53").count(), 2);
    }

    #[test]
    fn without_a_resolver_nothing_is_translated_on_its_way_in() {
        assert!(!slot_rules(None).contains("dport"));
        assert!(!host_rules("10.43.0.0/16", None).contains("dport"));
    }

    #[test]
    fn slots_reach_neither_the_host_nor_each_other() {
        let rules = host_rules("10.43.0.0/16", Some(RESOLVER));
        let siblings = position(&rules, "iifname \"forkd-*\" oifname \"forkd-*\" drop");
        let answers = position(&rules, "oifname \"forkd-*\" ct state established,related accept");
        assert!(siblings < answers);
        position(&rules, "        iifname \"forkd-*\" drop\n");
        position(&rules, "iifname \"forkd-*\" ip saddr != 10.43.0.0/16 drop");
    }

    #[test]
    fn the_hosts_rules_take_the_place_of_older_ones() {
        let rules = host_rules("10.43.0.0/16", None);
        assert!(rules.starts_with("table inet forkd {\n}\ndelete table inet forkd\ntable inet forkd {\n"));
    }
}
