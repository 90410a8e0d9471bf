//! `forkd mcp config`: the settings of common clients.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::super::{Context, WrongUsage, runtime};
use crate::args::{DaemonArgs, McpClient, McpConfigArgs};
use crate::client::discover;
use crate::ui;

/// How a client reaches the server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Reach {
    /// It starts a program, with variables.
    Program { path: String, variables: Vec<(&'static str, String)> },
    /// It sends requests to a URL, with a token.
    Http { url: String, token: String },
}

/// Prints the settings of a client.
pub(crate) fn config(context: &Context, args: &McpConfigArgs) -> Result<u8> {
    if args.http && args.client == McpClient::ClaudeDesktop {
        let text = "Claude Desktop reads no URL from its settings; leave --http out";
        return Err(WrongUsage::new(text).into());
    }
    let reach = if args.http { http(context, args)? } else { program(context, args)? };
    ui::print(&settings(args.client, &reach)?)?;
    context.ui.note(place(args.client));
    Ok(0)
}

fn program(context: &Context, args: &McpConfigArgs) -> Result<Reach> {
    let path = std::env::current_exe().context("the path of this program is unknown")?;
    let data_dir = std::env::var_os("FORKD_DATA_DIR").map(|_| context.data.root());
    Ok(Reach::Program { path: absolute(&path)?, variables: variables(&args.daemon, data_dir)? })
}

/// The variables of the program. The client starts it in another folder than this one, so paths are absolute.
fn variables(daemon: &DaemonArgs, data_dir: Option<&Path>) -> Result<Vec<(&'static str, String)>> {
    let given = [
        ("FORKD_URL", daemon.daemon_url.clone()),
        ("FORKD_TOKEN", daemon.daemon_token.clone()),
        ("FORKD_CACERT", daemon.cacert.as_deref().map(absolute).transpose()?),
        ("FORKD_DATA_DIR", data_dir.map(absolute).transpose()?),
    ];
    Ok(given.into_iter().filter_map(|(name, value)| Some((name, value?))).collect())
}

fn absolute(path: &Path) -> Result<String> {
    let whole = std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))?;
    let text = whole.into_os_string().into_string().ok();
    text.with_context(|| format!("the path {} is not UTF-8; settings cannot hold it", path.display()))
}

fn http(context: &Context, args: &McpConfigArgs) -> Result<Reach> {
    let runtime = runtime()?;
    let found = runtime.block_on(async {
        let daemon = discover::ensure(&context.data, &args.daemon, context.ui).await?;
        let token = discover::token(&context.data, &daemon)?;
        Ok(Reach::Http { url: format!("{}/mcp", daemon.http_url().await?), token })
    });
    runtime.shutdown_background();
    found
}

/// Where the settings belong.
fn place(client: McpClient) -> &'static str {
    match client {
        McpClient::ClaudeDesktop => {
            "add this to claude_desktop_config.json (Settings, Developer, Edit Config), and restart Claude Desktop"
        }
        McpClient::ClaudeCode => "run this command",
        McpClient::Cursor => "add this to ~/.cursor/mcp.json, or to .cursor/mcp.json of a project",
        McpClient::Cline => "add this to cline_mcp_settings.json (MCP Servers, Configure MCP Servers)",
        McpClient::Vscode => {
            "add this to .vscode/mcp.json of a workspace, or to the user's mcp.json (MCP: Open User Configuration)"
        }
    }
}

fn settings(client: McpClient, reach: &Reach) -> Result<String> {
    let value = match client {
        McpClient::ClaudeCode => return Ok(command(reach)),
        McpClient::ClaudeDesktop | McpClient::Cursor | McpClient::Cline => {
            json!({ "mcpServers": { "forkd": entry(client, reach) } })
        }
        McpClient::Vscode => json!({ "servers": { "forkd": entry(client, reach) } }),
    };
    Ok(serde_json::to_string_pretty(&value)?)
}

fn entry(client: McpClient, reach: &Reach) -> Value {
    match reach {
        Reach::Program { path, variables } => {
            let mut entry = json!({ "command": path, "args": ["mcp"] });
            if client == McpClient::Vscode {
                entry["type"] = json!("stdio");
            }
            if !variables.is_empty() {
                let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
                entry["env"] = Value::Object(variables.collect());
            }
            entry
        }
        Reach::Http { url, token } => {
            let mut entry = json!({ "url": url, "headers": { "Authorization": format!("Bearer {token}") } });
            match client {
                McpClient::Vscode => entry["type"] = json!("http"),
                McpClient::Cline => entry["type"] = json!("streamableHttp"),
                _ => {}
            }
            entry
        }
    }
}

/// The command that adds the server to Claude Code.
fn command(reach: &Reach) -> String {
    match reach {
        Reach::Program { path, variables } => {
            let variables = variables
                .iter()
                .map(|(name, value)| format!(" --env {}", quoted(&format!("{name}={value}"))));
            let variables: String = variables.collect();
            format!("claude mcp add forkd{variables} -- {} mcp", quoted(path))
        }
        Reach::Http { url, token } => {
            let header = quoted(&format!("Authorization: Bearer {token}"));
            format!("claude mcp add --transport http forkd {} --header {header}", quoted(url))
        }
    }
}

/// A word for a shell.
fn quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=@%+,".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENTS: [McpClient; 5] = [
        McpClient::ClaudeDesktop,
        McpClient::ClaudeCode,
        McpClient::Cursor,
        McpClient::Cline,
        McpClient::Vscode,
    ];

    fn program() -> Reach {
        let variables = vec![("FORKD_URL", "https://forkd.example:8889".to_owned())];
        Reach::Program { path: "/opt/my forkd/forkd".into(), variables }
    }

    fn http() -> Reach {
        Reach::Http { url: "http://127.0.0.1:8889/mcp".into(), token: "t0k".into() }
    }

    #[test]
    fn every_client_gets_the_program_or_the_address_in_its_own_form() {
        for client in CLIENTS.into_iter().filter(|client| *client != McpClient::ClaudeCode) {
            let value: Value = serde_json::from_str(&settings(client, &program()).unwrap()).unwrap();
            let key = if client == McpClient::Vscode { "servers" } else { "mcpServers" };
            let entry = &value[key]["forkd"];
            assert_eq!((&entry["command"], &entry["args"]), (&json!("/opt/my forkd/forkd"), &json!(["mcp"])));
            assert_eq!(entry["env"]["FORKD_URL"], "https://forkd.example:8889");
            let value: Value = serde_json::from_str(&settings(client, &http()).unwrap()).unwrap();
            let entry = &value[key]["forkd"];
            assert_eq!(entry["url"], "http://127.0.0.1:8889/mcp");
            assert_eq!(entry["headers"]["Authorization"], "Bearer t0k");
        }
    }

    #[test]
    fn the_command_of_claude_code_is_safe_for_a_shell() {
        assert_eq!(
            settings(McpClient::ClaudeCode, &program()).unwrap(),
            "claude mcp add forkd --env FORKD_URL=https://forkd.example:8889 -- '/opt/my forkd/forkd' mcp"
        );
        assert_eq!(
            settings(McpClient::ClaudeCode, &http()).unwrap(),
            "claude mcp add --transport http forkd http://127.0.0.1:8889/mcp --header 'Authorization: Bearer t0k'"
        );
        assert_eq!(quoted("it's; rm -rf $HOME"), r"'it'\''s; rm -rf $HOME'");
    }

    #[test]
    fn paths_hold_for_a_client_that_starts_in_another_folder() {
        let here = std::env::current_dir().unwrap();
        let daemon = DaemonArgs { cacert: Some("certs/ca.pem".into()), ..DaemonArgs::default() };
        let expected = [("FORKD_CACERT", "certs/ca.pem"), ("FORKD_DATA_DIR", "data")];
        let expected = expected.map(|(name, path)| (name, here.join(path).to_str().unwrap().to_owned()));
        assert_eq!(variables(&daemon, Some(Path::new("data"))).unwrap(), expected);
        let daemon = DaemonArgs { cacert: Some("/etc/ca.pem".into()), ..DaemonArgs::default() };
        assert_eq!(variables(&daemon, None).unwrap(), [("FORKD_CACERT", "/etc/ca.pem".to_owned())]);
    }

    #[test]
    fn every_client_says_where_its_settings_belong() {
        assert!(CLIENTS.into_iter().all(|client| !place(client).is_empty()));
    }
}
