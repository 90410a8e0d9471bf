//! Packet filter rules, and the program that loads them.
//!
//! There are two tables, both called `inet forkd`. One is in every slot, the same in each: it limits the packets and the
//! destinations of a guest. One is on the host: it lets slots reach the outside and nothing else. Each of them alone stops
//! a guest from reaching a forbidden address. Only the host's table has the host's own public addresses and the networks
//! that the host is attached to.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::egress::{FORBIDDEN, FlowLimits, Opening, Prefix};
use crate::slot::{PREFIX, TAP, UPLINK};
use crate::{Error, GATEWAY_ADDRESS, GUEST_ADDRESS, Result};

/// The name of our tables.
pub(crate) const TABLE: &str = "inet forkd";

/// The host's set of networks that it is attached to.
const ATTACHED: &str = "attached";

/// The configurable part of the rules for guests' traffic.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    /// The name server that guests are led to.
    pub(crate) resolver: Option<Ipv4Addr>,
    /// Networks that are open although they are private.
    pub(crate) opened: Vec<Opening>,
    pub(crate) flows: FlowLimits,
}

/// Takes the place of our table, if there is one.
fn replaced() -> String {
    format!("table {TABLE} {{\n}}\ndelete table {TABLE}\n")
}

/// How long connection tracking remembers TCP connections that are over, or idle. Without it, flows that
/// do not count any more would fill its table.
fn timeouts(input: &str) -> String {
    format!(
        "ct timeout brief {{
        protocol tcp
        l3proto ip
        policy = {{ established: 7440, time_wait: 10 }}
    }}
    chain forget {{
        type filter hook prerouting priority -160
        iifname \"{input}\" ip protocol tcp ct timeout set \"brief\"
    }}"
    )
}

/// The rules of every slot, in place of those of an earlier daemon.
///
/// Packets that connection tracking cannot place are not translated either: they would leave with the
/// guest's address, so they do not leave. The slot itself takes only the guest's answers to programs of the host that
/// entered the slot.
///
/// Flows are limited when their first packet comes, before anything else is decided about it: a flow is
/// confirmed when its first packet has passed. To be new alone would not do, as a flow is that until it is
/// answered.
pub(crate) fn slot_rules(policy: &Policy) -> String {
    let resolve = match policy.resolver {
        Some(resolver) => format!(
            "iifname \"{TAP}\" ip daddr {GATEWAY_ADDRESS} udp dport 53 dnat ip to {resolver}
        iifname \"{TAP}\" ip daddr {GATEWAY_ADDRESS} tcp dport 53 dnat ip to {resolver}"
        ),
        None => String::new(),
    };
    let opened = policy.opened.iter().flat_map(|Opening { prefix, port }| {
        let ports = match port {
            Some(port) => vec![format!("udp dport {port} "), format!("tcp dport {port} ")],
            None => vec![String::new()],
        };
        let rule = |port| format!("iifname \"{TAP}\" oifname \"{UPLINK}\" ip daddr {prefix} {port}accept");
        ports.into_iter().map(rule).collect::<Vec<_>>()
    });
    let opened = opened.collect::<Vec<_>>().join("\n        ");
    let FlowLimits { at_once, per_sec, burst } = policy.flows;
    let (replaced, timeouts) = (replaced(), timeouts(TAP));
    format!(
        "{replaced}table {TABLE} {{
    {timeouts}
    chain source {{
        type filter hook prerouting priority -300
        meta nfproto ipv6 drop
        iifname \"{TAP}\" ip saddr != {GUEST_ADDRESS} drop
    }}
    chain flows {{
        type filter hook prerouting priority -150
        iifname \"{TAP}\" ct status ! confirmed limit rate over {per_sec}/second burst {burst} packets drop
        iifname \"{TAP}\" ct status ! confirmed ct count over {at_once} drop
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
        {opened}
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
///
/// Many hosts translate packets to addresses of their own, or of services, and forward them to containers.
/// So the rules drop packets for the host before a translation, and judge translated packets by the address that the guest
/// has used.
pub(crate) fn host_rules(outer: &str, policy: &Policy, attached: &BTreeSet<Prefix>) -> String {
    // A resolver may be this host itself, in its networks, or a service that it translates.
    let resolver = policy.resolver.map(|resolver| {
        let to = |protocol| format!("iifname \"{PREFIX}*\" ip daddr {resolver} {protocol} dport 53 accept");
        (["udp", "tcp"].map(to).join("\n        "), asked_for(&resolver.to_string(), Some(53)))
    });
    let (to_resolver, for_resolver) = resolver.unwrap_or_default();
    let opened = policy.opened.iter().map(|opening| asked_for(&opening.prefix.to_string(), opening.port));
    let opened = opened.collect::<Vec<_>>().join("\n        ");
    let (replaced, timeouts) = (replaced(), timeouts(&format!("{PREFIX}*")));
    let attached = elements(attached);
    format!(
        "{replaced}table {TABLE} {{
    {timeouts}
    set {ATTACHED} {{
        type ipv4_addr
        flags interval
        auto-merge
        {attached}
    }}
    chain source {{
        type filter hook prerouting priority -300
        iifname \"{PREFIX}*\" meta nfproto ipv6 drop
        iifname \"{PREFIX}*\" ip saddr != {outer} drop
        {to_resolver}
        iifname \"{PREFIX}*\" fib daddr type {{ local, broadcast, anycast, multicast }} drop
    }}
    chain host {{
        type filter hook input priority 0
        {to_resolver}
        iifname \"{PREFIX}*\" drop
    }}
    chain reach {{
        type filter hook forward priority 0
        iifname \"{PREFIX}*\" oifname \"{PREFIX}*\" drop
        oifname \"{PREFIX}*\" ct state established,related accept
        oifname \"{PREFIX}*\" drop
        {for_resolver}
        {opened}
        iifname \"{PREFIX}*\" ct status dnat drop
        iifname \"{PREFIX}*\" ip daddr {{ {FORBIDDEN} }} drop
        iifname \"{PREFIX}*\" ip daddr @{ATTACHED} drop
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

/// Rules that accept packets of slots that were first sent to `network`, also after a translation of their address.
fn asked_for(network: &str, port: Option<u16>) -> String {
    let from = format!("iifname \"{PREFIX}*\"");
    match port {
        Some(port) => ["udp", "tcp"]
            .map(|protocol| {
                let protocol = format!("meta l4proto {protocol}");
                format!(
                    "{from} {protocol} ct original ip daddr {network} ct original proto-dst {port} accept"
                )
            })
            .join("\n        "),
        None => format!("{from} ct original ip daddr {network} accept"),
    }
}

/// The nft script that replaces the host table's list of attached networks.
pub(crate) fn attached_networks(networks: &BTreeSet<Prefix>) -> String {
    let flush = format!("flush set {TABLE} {ATTACHED}\n");
    match list(networks) {
        Some(list) => format!("{flush}add element {TABLE} {ATTACHED} {{ {list} }}\n"),
        None => flush,
    }
}

fn elements(networks: &BTreeSet<Prefix>) -> String {
    list(networks).map(|list| format!("elements = {{ {list} }}")).unwrap_or_default()
}

/// `None` if there is nothing to list, for which there is no way of writing.
fn list(networks: &BTreeSet<Prefix>) -> Option<String> {
    let networks: Vec<_> = networks.iter().map(ToString::to_string).collect();
    (!networks.is_empty()).then(|| networks.join(", "))
}

/// The program that loads rules.
#[derive(Debug, Clone)]
pub(crate) struct Nft(PathBuf);

impl Nft {
    /// `None` if it is not installed.
    pub(crate) fn find() -> Option<Self> {
        // `nft` is often in an sbin folder, which daemons may not have in their path.
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
        // The error and its rule: most likely one that this kernel does not support.
        let said: Vec<&str> = said.lines().take(2).map(str::trim).collect();
        Err(Error::Nft(if said.is_empty() { "it said nothing".into() } else { said.join(": ") }))
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
        // A program that ends without reading prints the reason to stderr.
        let _ = stdin.write_all(input.as_bytes());
    }
    child.wait_with_output()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESOLVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 53);

    fn policy(resolver: Option<Ipv4Addr>, opened: &[&str]) -> Policy {
        let opened = opened.iter().map(|opening| opening.parse().unwrap()).collect();
        Policy { resolver, opened, flows: FlowLimits { at_once: 7, per_sec: 8, burst: 9 } }
    }

    fn host(policy: &Policy) -> String {
        let attached = Prefix::new(Ipv4Addr::new(55, 1, 0, 0), 16);
        host_rules("10.43.0.0/16", policy, &attached.into_iter().collect())
    }

    fn position(rules: &str, line: &str) -> usize {
        rules.find(line).unwrap_or_else(|| panic!("no `{line}` in\n{rules}"))
    }

    /// The lines are all there, in this order.
    fn in_order(rules: &str, lines: &[&str]) {
        let positions: Vec<_> = lines.iter().map(|line| position(rules, line)).collect();
        assert!(positions.is_sorted(), "{lines:?} in another order in\n{rules}");
    }

    #[test]
    fn forbidden_ranges_are_dropped_before_anything_is_let_out_but_dns_and_what_is_opened() {
        let rules = slot_rules(&policy(Some(RESOLVER), &["10.1.0.0/16", "10.2.0.3:5432"]));
        in_order(
            &rules,
            &[
                "ct status dnat accept",
                "oifname \"uplink\" ip daddr 10.1.0.0/16 accept",
                "oifname \"uplink\" ip daddr 10.2.0.3/32 tcp dport 5432 accept",
                "ip daddr { 0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10,",
                "iifname \"tap0\" oifname \"uplink\" accept",
            ],
        );
        // Translated packets other than DNS would pass the first of them.
        assert_eq!(rules.matches("dnat ip to").count(), 2);
        assert_eq!(rules.matches("dport 53 dnat ip to 192.0.2.53").count(), 2);
    }

    #[test]
    fn only_new_flows_are_limited() {
        let rules = slot_rules(&policy(None, &[]));
        position(&rules, "ct status ! confirmed limit rate over 8/second burst 9 packets drop");
        position(&rules, "ct status ! confirmed ct count over 7 drop");
        assert_eq!(rules.matches(" over ").count(), 2);
    }

    #[test]
    fn without_a_resolver_nothing_is_translated_on_its_way_in() {
        assert!(!slot_rules(&policy(None, &[])).contains("dport"));
        assert!(!host(&policy(None, &[])).contains("dport"));
    }

    #[test]
    fn slots_reach_neither_the_host_nor_each_other_nor_what_the_host_forwards_to() {
        let rules = host(&policy(Some(RESOLVER), &["10.1.0.0/16", "10.2.0.3:5432"]));
        in_order(
            &rules,
            &[
                "iifname \"forkd-*\" ip saddr != 10.43.0.0/16 drop",
                "iifname \"forkd-*\" ip daddr 192.0.2.53 tcp dport 53 accept",
                "iifname \"forkd-*\" fib daddr type { local, broadcast, anycast, multicast } drop",
                "        iifname \"forkd-*\" drop\n",
                "iifname \"forkd-*\" oifname \"forkd-*\" drop",
                "oifname \"forkd-*\" ct state established,related accept",
                "ct original ip daddr 192.0.2.53 ct original proto-dst 53 accept",
                "ct original ip daddr 10.1.0.0/16 accept",
                "ct original ip daddr 10.2.0.3/32 ct original proto-dst 5432 accept",
                "iifname \"forkd-*\" ct status dnat drop",
                "ip daddr { 0.0.0.0/8,",
                "ip daddr @attached drop",
                "        iifname \"forkd-*\" accept\n",
            ],
        );
        position(&rules, "elements = { 55.1.0.0/16 }");
    }

    #[test]
    fn rules_take_the_place_of_older_ones() {
        let policy = policy(None, &[]);
        for rules in [slot_rules(&policy), host(&policy)] {
            let start = "table inet forkd {\n}\ndelete table inet forkd\ntable inet forkd {\n";
            assert!(rules.starts_with(start), "{rules}");
        }
    }

    #[test]
    fn a_host_without_networks_has_an_empty_list() {
        assert_eq!(attached_networks(&BTreeSet::new()), "flush set inet forkd attached\n");
        assert!(!host_rules("10.43.0.0/16", &policy(None, &[]), &BTreeSet::new()).contains("elements"));
    }
}
