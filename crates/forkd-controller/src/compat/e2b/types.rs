//! Bodies of the control API: what clients send, and what they get.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use forkd_api::MAX_TIMEOUT_SECS;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compat::e2b::ENVD_VERSION;
use crate::compat::e2b::fields::{NoOthers, is_absent, is_empty};
use crate::error::{Code, Error, Result};
use crate::sandbox::e2b::{DEFAULT_TIMEOUT_SECS, E2bState};

/// The `clientID` of every sandbox.
const CLIENT: &str = "forkd";
/// The most bytes of a sandbox's metadata.
const MAX_METADATA: usize = 16 << 10;

/// The fields of `network` that this daemon does not have. docs/E2B.md lists them.
const NETWORK: [&str; 7] =
    ["allowOut", "denyOut", "dnsServers", "egressProxy", "rules", "maskRequestHost", "httpsPorts"];

/// `POST /sandboxes`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NewSandbox {
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    timeout: Option<u64>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) env_vars: Option<BTreeMap<String, String>>,
    #[serde(rename = "allow_internet_access")]
    pub(super) allow_internet_access: Option<bool>,
    pub(super) auto_pause: Option<bool>,
    pub(super) auto_pause_memory: Option<bool>,
    pub(super) auto_resume: Option<AutoResume>,
    network: Option<serde_json::Map<String, Value>>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Value>,
    #[serde(flatten)]
    _others: NoOthers,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AutoResume {
    pub(super) enabled: bool,
    #[serde(flatten)]
    _others: NoOthers,
}

fn unsupported(field: &str) -> Error {
    Error::new(
        Code::NotImplemented,
        format!("forkd does not have `{field}`; leave it out (docs/E2B.md lists what there is)"),
    )
}

impl NewSandbox {
    /// Fails for fields that this daemon does not have: ignoring one would open what it is to close.
    pub(super) fn check(&self) -> Result<()> {
        let fields = [("mcp", &self.mcp), ("iam", &self.iam), ("volumeMounts", &self.volume_mounts)];
        if let Some((name, _)) =
            fields.iter().find(|(_, value)| value.as_ref().is_some_and(|it| !is_empty(it)))
        {
            return Err(unsupported(name));
        }
        let public = self.network.as_ref().and_then(|network| network.get("allowPublicTraffic"));
        if public.is_some_and(|value| !matches!(value, Value::Null | Value::Bool(_))) {
            return Err(Error::invalid("network.allowPublicTraffic must be true or false"));
        }
        let network = self.network.iter().flatten();
        let asks = |(name, value): &(&String, &Value)| match name.as_str() {
            "allowPublicTraffic" => false,
            name if NETWORK.contains(&name) => !is_empty(value),
            _ => !is_absent(value),
        };
        if let Some((name, _)) = network.into_iter().find(asks) {
            return Err(unsupported(&format!("network.{name}")));
        }
        let metadata = self.metadata.iter().flatten().map(|(key, value)| key.len() + value.len());
        let length = metadata.sum::<usize>();
        if length > MAX_METADATA {
            return Err(Error::invalid(format!(
                "metadata has {length} bytes, and {MAX_METADATA} is the limit"
            )));
        }
        Ok(())
    }

    /// The time-out in seconds.
    pub(super) fn timeout(&self) -> Result<u64> {
        check_timeout(self.timeout).map(|secs| secs.unwrap_or(DEFAULT_TIMEOUT_SECS))
    }

    /// Whether clients reach the sandbox's ports without a token.
    pub(super) fn public_traffic(&self) -> bool {
        let field = self.network.as_ref().and_then(|network| network.get("allowPublicTraffic"));
        field.is_none_or(|value| *value != Value::Bool(false))
    }
}

/// Checks a time-out in seconds; 0 ends or pauses the sandbox at once.
pub(super) fn check_timeout(secs: Option<u64>) -> Result<Option<u64>> {
    match secs {
        Some(secs) if secs > MAX_TIMEOUT_SECS => {
            Err(Error::invalid(format!("timeout is {secs}; it must be 0 to {MAX_TIMEOUT_SECS} seconds")))
        }
        secs => Ok(secs),
    }
}

/// `connect` and `resume`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Connect {
    pub(super) timeout: Option<u64>,
    /// `false`: boot a paused sandbox anew, from its disks.
    pub(super) memory: Option<bool>,
    #[serde(flatten)]
    _others: NoOthers,
}

/// `timeout`.
#[derive(Debug, Deserialize)]
pub(super) struct SetTimeout {
    pub(super) timeout: u64,
    #[serde(flatten)]
    _others: NoOthers,
}

/// `refreshes`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refresh {
    pub(super) duration: Option<u64>,
    #[serde(flatten)]
    _others: NoOthers,
}

/// `pause`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Pause {
    pub(super) memory: Option<bool>,
    pub(super) require_healthy_guest: Option<bool>,
    #[serde(flatten)]
    _others: NoOthers,
}

/// A sandbox, for its maker.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Connected {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    envd_access_token: String,
    traffic_access_token: String,
    domain: Option<String>,
}

impl Connected {
    pub(super) fn new(id: &str, state: &E2bState) -> Self {
        Connected {
            template_id: state.template.clone(),
            sandbox_id: id.to_owned(),
            client_id: CLIENT,
            envd_version: ENVD_VERSION,
            envd_access_token: state.access_token.clone(),
            traffic_access_token: state.traffic_token.clone(),
            domain: None,
        }
    }
}

/// The size of a sandbox.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) vcpus: u8,
    pub(super) mem_mib: u64,
    pub(super) disk_mib: u64,
}

/// A sandbox in a list.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Listed {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    pub(super) sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    started_at: String,
    end_at: String,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    envd_version: &'static str,
    metadata: BTreeMap<String, String>,
}

impl Listed {
    /// `end_at` is none for a sandbox without a deadline, as most paused ones are.
    pub(super) fn new(id: &str, state: &E2bState, size: Size, end_at: Option<u64>, paused: bool) -> Self {
        let started = state.started_at_unix_ms;
        Listed {
            template_id: state.template.clone(),
            sandbox_id: id.to_owned(),
            client_id: CLIENT,
            started_at: time(started),
            end_at: time(end_at.map_or(started, |secs| secs.saturating_mul(1000))),
            cpu_count: size.vcpus,
            memory_mb: size.mem_mib,
            disk_size_mb: size.disk_mib,
            state: if paused { "paused" } else { "running" },
            envd_version: ENVD_VERSION,
            metadata: state.metadata.clone(),
        }
    }
}

/// A sandbox in detail.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Detail {
    #[serde(flatten)]
    pub(super) listed: Listed,
    /// For clients that may use the sandbox: it lets them run commands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) envd_access_token: Option<String>,
    pub(super) domain: Option<String>,
    pub(super) allow_internet_access: bool,
    pub(super) lifecycle: Lifecycle,
}

/// What happens at the deadline, and at a request to a paused sandbox.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

impl Lifecycle {
    pub(super) fn of(state: &E2bState) -> Self {
        let on_timeout = if state.auto_pause { "pause" } else { "kill" };
        Lifecycle { auto_resume: state.auto_resume, on_timeout }
    }
}

/// A time in milliseconds since 1970, as clients read it.
pub(super) fn time(unix_ms: u64) -> String {
    // The last year that the format can show.
    const LAST_MS: u64 = 253_402_300_799_000;
    let at = UNIX_EPOCH + Duration::from_millis(unix_ms.min(LAST_MS));
    humantime::format_rfc3339_millis(at).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> NewSandbox {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_clients_send_by_default_is_accepted() {
        let plain = parse(json!({"templateID": "base", "metadata": {}, "envVars": {}}));
        plain.check().unwrap();
        assert_eq!(plain.timeout().unwrap(), DEFAULT_TIMEOUT_SECS);
        assert!(plain.public_traffic());
        let empty = parse(json!({
            "templateID": "base", "timeout": 0, "secure": true, "mcp": null, "volumeMounts": [], "iam": {},
            "network": {"allowPublicTraffic": false, "allowOut": [], "rules": {}},
        }));
        empty.check().unwrap();
        assert_eq!(empty.timeout().unwrap(), 0);
        assert!(!empty.public_traffic());
    }

    #[test]
    fn a_field_that_is_not_there_is_refused_by_name() {
        for (field, value) in [
            ("mcp", json!({"mcp": {"github": {"token": "x"}}})),
            ("volumeMounts", json!({"volumeMounts": [{"name": "v", "path": "/v"}]})),
            ("iam", json!({"iam": {"tokens": {"a": {"audience": "b"}}}})),
            ("network.allowOut", json!({"network": {"allowOut": ["1.1.1.1"]}})),
            ("network.denyOut", json!({"network": {"denyOut": ["0.0.0.0/0"]}})),
            ("network.dnsServers", json!({"network": {"dnsServers": ["1.1.1.1"]}})),
            (
                "network.rules",
                json!({"network": {"rules": {"a.b": [{"transform": {"headers": {"k": "v"}}}]}}}),
            ),
            ("network.egressProxy", json!({"network": {"egressProxy": {"address": "x:1"}}})),
            ("network.maskRequestHost", json!({"network": {"maskRequestHost": "a.b"}})),
            ("network.httpsPorts", json!({"network": {"httpsPorts": [443]}})),
            ("network.allowInternetAccess", json!({"network": {"allowInternetAccess": false}})),
        ] {
            let error = parse(value).check().unwrap_err();
            assert_eq!(error.code(), Code::NotImplemented);
            assert!(error.public().contains(field), "{error}");
        }
        let long = parse(json!({"metadata": {"k": "x".repeat(MAX_METADATA)}}));
        assert!(long.check().unwrap_err().public().contains("metadata"));
        assert!(parse(json!({"timeout": MAX_TIMEOUT_SECS + 1})).timeout().is_err());
        for unclear in [json!("false"), json!(0), json!([])] {
            let error = parse(json!({"network": {"allowPublicTraffic": unclear}})).check().unwrap_err();
            assert_eq!(error.code(), Code::InvalidRequest, "ports must not stay public: {error}");
        }
    }

    #[test]
    fn a_field_of_another_name_is_refused_and_not_ignored() {
        let closes = json!({"templateID": "base", "allowInternetAccess": false});
        let error = serde_json::from_value::<NewSandbox>(closes).unwrap_err();
        assert!(error.to_string().contains("`allowInternetAccess`"), "{error}");
        for (body, field) in [(json!({"memry": false}), "memry"), (json!({"keepMemory": true}), "keepMemory")]
        {
            let error = serde_json::from_value::<Pause>(body).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
    }

    #[test]
    fn the_page_lists_every_field_that_is_not_here() {
        let page = include_str!("../../../../../docs/E2B.md");
        let (_, list) = page.split_once("## What is not there").unwrap();
        for field in NETWORK.iter().chain(&["mcp", "iam", "volumeMounts"]) {
            assert!(list.contains(&format!("`{field}`")), "{field}");
        }
    }

    #[test]
    fn times_are_in_the_format_of_the_clients() {
        assert_eq!(time(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
        time(u64::MAX);
    }
}
