//! All tokens, and the principal of each. The database has the hashes of named tokens. The first token, called
//! `default`, is in a file that the daemon makes; the file's permissions decide which users may read it.
//!
//! A look-up is in memory and by hash. It takes the same time for every token, and for none. This module knows no
//! HTTP.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forkd_protocol::names::{NAME_RULE, is_valid_name};
use forkd_store::{Database, Quota, Token, TokenHash};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::auth::principal::{FIRST_TOKEN, LOCAL, Principal, Proof, Scope};
use crate::error::{Code, Error, Result};
use crate::util::fs::{Stamp, stamp};
use crate::util::random::fill_random;
use crate::util::time::now_unix;

/// The longest token.
const MAX_TOKEN: usize = 4096;
/// A shorter token could be guessed.
const MIN_TOKEN: usize = 16;
/// Words in example tokens that users must replace.
const PLACEHOLDERS: [&str; 2] = ["REPLACE_ME", "CHANGE_ME"];
/// The most named tokens: each look-up compares with all of them.
const MAX_NAMED: usize = 4096;
/// The largest value of any limit: integers of the database are signed.
const MAX_LIMIT: u64 = 1 << 40;
/// How often the daemon checks whether a token in use is still good.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest lifetime of a token: 100 years.
const MAX_LIFETIME_SECS: u64 = 100 * 366 * 24 * 3600;

/// All tokens of a daemon. Calls that change something block.
#[derive(Debug)]
pub(crate) struct Tokens {
    database: Arc<Database>,
    /// The file of the first token.
    path: PathBuf,
    known: RwLock<Known>,
    /// How often the tokens in the database were read.
    reads: AtomicU64,
    /// Held while the file of the first token is read or replaced.
    file: Mutex<()>,
}

#[derive(Default)]
struct Known {
    /// The first token's hash and time; none while its file holds no usable token.
    first: Option<(TokenHash, u64)>,
    /// The state of its file at the last read.
    stamp: Option<Stamp>,
    named: Vec<(Token, TokenHash)>,
    /// The number of the database read that the named tokens are from.
    read: u64,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tokens", self.named.len() + 1)
    }
}

/// The order for a new token.
#[derive(Debug)]
pub(crate) struct TokenSpec {
    pub(crate) name: String,
    pub(crate) scope: Scope,
    /// The owner of what the token's bearer makes; by default the token's name.
    pub(crate) owner: Option<String>,
    pub(crate) quota: Quota,
    pub(crate) expires_in_secs: Option<u64>,
}

/// Why a token is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenError {
    Unknown,
    Expired,
}

impl Tokens {
    /// Opens the tokens in the database and the first token in `path`, which is made if there is none.
    pub(crate) fn open(database: Arc<Database>, path: PathBuf) -> Result<Self> {
        if File::open(&path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            let failed = |error| Error::host(format!("cannot make the token file {}", path.display()), error);
            write(&path, &fresh("")?, false).map_err(failed)?;
        }
        let named = database.tokens()?;
        let known = RwLock::new(Known { named, ..Known::default() });
        let tokens = Tokens { database, path, known, reads: AtomicU64::new(0), file: Mutex::default() };
        tokens.refresh()?;
        Ok(tokens)
    }

    fn known(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read()
    }

    fn change(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write()
    }

    /// The principal of the token `secret`.
    pub(crate) fn find(&self, secret: &str, now_unix: u64) -> std::result::Result<Principal, TokenError> {
        if secret.len() > MAX_TOKEN {
            return Err(TokenError::Unknown);
        }
        let (known, hash) = (self.known(), hash(secret));
        let first = known.first.as_ref().map(|(first, _)| first.ct_eq(&hash));
        let mut found = u64::MAX;
        for (index, (_, named)) in known.named.iter().enumerate() {
            found.conditional_assign(&(index as u64), named.ct_eq(&hash));
        }
        if first.unwrap_or(Choice::from(0)).into() {
            return Ok(Principal { proof: Some(Proof(hash)), ..Principal::default_token() });
        }
        let found = usize::try_from(found).ok().and_then(|index| known.named.get(index));
        let (token, _) = found.ok_or(TokenError::Unknown)?;
        if token.expires_at_unix.is_some_and(|at| at <= now_unix) {
            return Err(TokenError::Expired);
        }
        let Token { name, owner, scope, quota, .. } = token.clone();
        Ok(Principal { name, owner, scope, quota, proof: Some(Proof(hash)) })
    }

    /// Whether the token by which the principal was authenticated is still good.
    fn is_good(&self, who: &Principal, now_unix: u64) -> bool {
        let Some(Proof(shown)) = who.proof else { return true };
        let known = self.known();
        let lives = |token: &Token| token.expires_at_unix.is_none_or(|at| at > now_unix);
        known.first.is_some_and(|(first, _)| first == shown)
            || known.named.iter().any(|(token, hash)| *hash == shown && lives(token))
    }

    /// Returns when the principal's token is no longer good: its open connections must end then.
    pub(crate) async fn revoked(&self, who: &Principal) {
        while self.is_good(who, now_unix()) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// All tokens, the first token first.
    pub(crate) fn list(&self) -> Vec<Token> {
        let known = self.known();
        let first = known.first.map(|(_, created_at_unix)| default_token(created_at_unix));
        first.into_iter().chain(known.named.iter().map(|(token, _)| token.clone())).collect()
    }

    /// The largest limits of the owner's tokens: the quota for actions of the daemon without a request.
    pub(crate) fn quota_of(&self, owner: &str) -> Quota {
        let known = self.known();
        let theirs =
            known.named.iter().filter(|(token, _)| token.owner == owner).map(|(token, _)| token.quota);
        // The host owner's first token has no limits. Neither has an owner without tokens: it can start nothing new.
        let without = owner == LOCAL;
        let largest = |limit: fn(&Quota) -> Option<u64>| {
            let limits: Option<Vec<u64>> = theirs.clone().map(|quota| limit(&quota)).collect();
            limits.filter(|_| !without)?.into_iter().max()
        };
        Quota {
            max_sandboxes: largest(|quota| quota.max_sandboxes),
            max_memory_mib: largest(|quota| quota.max_memory_mib),
            max_snapshots: largest(|quota| quota.max_snapshots),
        }
    }

    /// Makes a token. Returns its record and its secret, which the daemon does not store and never shows again.
    pub(crate) fn add(&self, order: TokenSpec, now_unix: u64) -> Result<(Token, String)> {
        let token = order.check(now_unix)?;
        // Concurrent requests may exceed the limit by a few: no lock is held while the database writes.
        if self.known().named.len() >= MAX_NAMED {
            let text = format!("there are {MAX_NAMED} tokens, the limit; remove some first");
            return Err(Error::new(Code::TooManyTokens, text));
        }
        let secret = fresh("fk_")?;
        self.database.add_token(&token, &hash(&secret)).map_err(of_token)?;
        self.reload()?;
        Ok((token, secret))
    }

    /// Removes a token: from then on it is refused.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        if name == FIRST_TOKEN {
            let text = format!("the token {FIRST_TOKEN} cannot be removed; `forkd token rotate` replaces it");
            return Err(Error::new(Code::NameReserved, text));
        }
        self.database.remove_token(name).map_err(of_token)?;
        self.reload()
    }

    /// Gives a token another secret: from then on the old one is refused.
    pub(crate) fn rotate(&self, name: &str) -> Result<(Token, String)> {
        let first = name == FIRST_TOKEN;
        let secret = fresh(if first { "" } else { "fk_" })?;
        if first {
            let _alone = self.file.lock();
            write(&self.path, &secret, true)
                .map_err(|error| Error::host(format!("cannot write {}", self.path.display()), error))?;
            self.read()?;
        } else {
            self.database.replace_token(name, &hash(&secret)).map_err(of_token)?;
            self.reload()?;
        }
        let token = self.list().into_iter().find(|token| token.name == name);
        Ok((token.ok_or_else(|| Error::host("cannot rotate the token", "it was removed meanwhile"))?, secret))
    }

    /// Reads the first token again if its file has changed. An error is returned once for every change.
    pub(crate) fn refresh(&self) -> Result<()> {
        let _alone = self.file.lock();
        let now = std::fs::metadata(&self.path).ok().as_ref().map(stamp);
        if now.is_some() && now == self.known().stamp {
            return Ok(());
        }
        if now.is_none() && self.known().first.is_none() {
            return Ok(());
        }
        self.read()
    }

    fn read(&self) -> Result<()> {
        // Before the read: a write meanwhile changes the stamp and is read the next time.
        let stamp = std::fs::metadata(&self.path).ok().as_ref().map(stamp);
        let loaded = load(&self.path);
        let mut known = self.change();
        known.stamp = stamp;
        // An operator that removes or breaks the file wants the old token to be refused.
        known.first = None;
        let gone = || Error::host(self.path.display(), "the token file is gone; make it again");
        let (secret, created) = loaded?.ok_or_else(gone)?;
        known.first = Some((hash(&secret), created));
        Ok(())
    }

    /// Reads the named tokens from the database again. Of two reads at the same time the later one counts.
    fn reload(&self) -> Result<()> {
        // Numbered after the change that it is called for: a read with a higher number includes that change.
        let read = self.reads.fetch_add(1, Ordering::SeqCst) + 1;
        let named = self.database.tokens()?;
        let mut known = self.change();
        if read > known.read {
            (known.named, known.read) = (named, read);
        }
        Ok(())
    }
}

impl TokenSpec {
    fn check(self, now_unix: u64) -> Result<Token> {
        let owner = self.owner.unwrap_or_else(|| self.name.clone());
        for (what, name) in [("name", &self.name), ("owner", &owner)] {
            if !is_valid_name(name) {
                return Err(Error::invalid(format!("a token's {what} must be {NAME_RULE}")));
            }
        }
        if [FIRST_TOKEN, LOCAL].contains(&self.name.as_str()) {
            return Err(Error::new(
                Code::NameReserved,
                format!("the name {} is taken; choose another", self.name),
            ));
        }
        let Quota { max_sandboxes, max_memory_mib, max_snapshots } = self.quota;
        if [max_sandboxes, max_memory_mib, max_snapshots].iter().flatten().any(|max| *max > MAX_LIMIT) {
            return Err(Error::invalid(format!("a limit can be at most {MAX_LIMIT}")));
        }
        if self.expires_in_secs.is_some_and(|secs| !(1..=MAX_LIFETIME_SECS).contains(&secs)) {
            return Err(Error::invalid(format!("expires_in_secs must be 1 to {MAX_LIFETIME_SECS}")));
        }
        Ok(Token {
            name: self.name,
            scope: self.scope,
            owner,
            quota: self.quota,
            created_at_unix: now_unix,
            expires_at_unix: self.expires_in_secs.map(|secs| now_unix.saturating_add(secs)),
        })
    }
}

fn default_token(created_at_unix: u64) -> Token {
    let Principal { name, owner, scope, quota, .. } = Principal::default_token();
    Token { name, owner, scope, quota, created_at_unix, expires_at_unix: None }
}

fn hash(secret: &str) -> TokenHash {
    blake3::hash(secret.as_bytes()).into()
}

/// A new secret.
fn fresh(prefix: &str) -> Result<String> {
    let mut random = [0u8; 32];
    fill_random(&mut random)?;
    let mut text = prefix.to_owned();
    text.extend(random.iter().map(|byte| format!("{byte:02x}")));
    Ok(text)
}

/// The token in `path` and the time of the file, if there is a file.
fn load(path: &Path) -> Result<Option<(String, u64)>> {
    let failed =
        |error: io::Error| Error::host(format!("cannot read the token file {}", path.display()), error);
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed)?,
    };
    let metadata = file.metadata().map_err(failed)?;
    if metadata.permissions().mode() & 0o077 != 0 {
        tracing::warn!(path = %path.display(), "others may read the token file; `chmod 600` it");
    }
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, MAX_TOKEN as u64), &mut text).map_err(failed)?;
    let token = text.trim();
    if token.len() < MIN_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        let fix = format!("remove {} and start again to get a new one", path.display());
        return Err(Error::invalid(format!("the token file holds no usable token; {fix}")));
    }
    if let Some(word) = PLACEHOLDERS.iter().find(|word| token.to_ascii_uppercase().contains(*word)) {
        let fix = format!("remove {} and start again to get a real one", path.display());
        return Err(Error::invalid(format!("the token is the {word} of an example; {fix}")));
    }
    Ok(Some((token.to_owned(), u64::try_from(metadata.mtime()).unwrap_or(0))))
}

/// Writes a token. The file appears whole or not at all; it replaces an existing file only with `over`.
fn write(path: &Path, text: &str, over: bool) -> io::Result<()> {
    let temporary = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    let written = writeln!(file, "{text}").and_then(|()| file.sync_all());
    // A power cut must not bring the old token back.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let sync = || File::open(folder)?.sync_all();
    if over {
        return written.and_then(|()| std::fs::rename(&temporary, path)).and_then(|()| sync());
    }
    let linked = written.and_then(|()| std::fs::hard_link(&temporary, path));
    std::fs::remove_file(&temporary)?;
    match linked.and_then(|()| sync()) {
        // Another process may have made the file first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// The database's error, with the code for tokens.
fn of_token(error: forkd_store::Error) -> Error {
    let error = Error::from(error);
    match error.code() {
        Code::SnapshotNotFound => error.with_code(Code::TokenNotFound),
        Code::TagTaken => error.with_code(Code::NameTaken),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(folder: &Path) -> Result<Tokens> {
        let database = Arc::new(Database::open(&folder.join("forkd.db")).unwrap());
        Tokens::open(database, folder.join("token"))
    }

    fn order(name: &str) -> TokenSpec {
        let quota = Quota { max_sandboxes: Some(2), ..Quota::default() };
        TokenSpec { name: name.into(), scope: Scope::Write, owner: None, quota, expires_in_secs: Some(10) }
    }

    fn shown(folder: &Path) -> String {
        std::fs::read_to_string(folder.join("token")).unwrap().trim().to_owned()
    }

    #[test]
    fn the_first_token_is_made_once_for_its_owner_alone_and_then_kept() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = open(folder.path()).unwrap();
        let (path, first) = (folder.path().join("token"), shown(folder.path()));
        assert_eq!(first.len(), 64);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let who = tokens.find(&first, 0).unwrap();
        assert!(who.proof.is_some() && tokens.is_good(&who, 0));
        assert_eq!(Principal { proof: None, ..who }, Principal::default_token());
        assert_eq!(open(folder.path()).unwrap().find(&first, 0).unwrap().name, "default");
        assert!(!folder.path().join(format!("token.new-{}", std::process::id())).exists());
        assert!(!format!("{tokens:?}").contains(&first));
    }

    #[test]
    fn an_unusable_token_file_is_refused_with_the_fix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        for bad in [
            "",
            "short",
            "with spaces in the middle of it",
            "token-REPLACE_ME-please",
            "change_me_now_please",
        ] {
            std::fs::write(&path, bad).unwrap();
            let error = open(folder.path()).unwrap_err();
            assert!(error.public().contains("remove"), "{error}");
        }
    }

    #[test]
    fn another_token_in_the_file_counts_at_the_next_look_and_a_bad_one_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let (tokens, path) = (open(folder.path()).unwrap(), folder.path().join("token"));
        let old = shown(folder.path());
        tokens.refresh().unwrap();
        let new = "n".repeat(40);
        write(&path, &new, true).unwrap();
        tokens.refresh().unwrap();
        assert_eq!(tokens.find(&old, 0), Err(TokenError::Unknown));
        assert!(tokens.find(&new, 0).is_ok());
        std::fs::write(&path, "x").unwrap();
        assert!(tokens.refresh().is_err());
        assert!(tokens.refresh().is_ok(), "told once");
        assert_eq!(tokens.find(&new, 0), Err(TokenError::Unknown));
        std::fs::remove_file(&path).unwrap();
        assert!(tokens.refresh().is_ok(), "there was none before, either");
        write(&path, &new, true).unwrap();
        tokens.refresh().unwrap();
        assert!(tokens.find(&new, 0).is_ok());
    }

    #[test]
    fn a_named_token_is_found_until_it_is_rotated_removed_or_expired() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = open(folder.path()).unwrap();
        let (token, secret) = tokens.add(order("ci"), 100).unwrap();
        assert!(secret.starts_with("fk_") && secret.len() == 67, "{secret}");
        assert_eq!((token.owner.as_str(), token.expires_at_unix), ("ci", Some(110)));
        let who = tokens.find(&secret, 109).unwrap();
        assert_eq!((who.name.as_str(), who.scope, who.quota.max_sandboxes), ("ci", Scope::Write, Some(2)));
        assert_eq!(tokens.find(&secret, 110), Err(TokenError::Expired));
        for wrong in ["", "fk_", &secret[..66], &format!("{secret}0"), &secret.to_uppercase()] {
            assert_eq!(tokens.find(wrong, 0), Err(TokenError::Unknown), "{wrong}");
        }
        let database = std::fs::read(folder.path().join("forkd.db")).unwrap();
        let log = std::fs::read(folder.path().join("forkd.db-wal")).unwrap_or_default();
        let stored = [database, log].concat();
        assert!(!stored.windows(secret.len()).any(|window| window == secret.as_bytes()));

        let (_, other) = tokens.rotate("ci").unwrap();
        assert_eq!(tokens.find(&secret, 0), Err(TokenError::Unknown));
        assert!(tokens.find(&other, 0).is_ok());
        let first = shown(folder.path());
        let (rotated, new) = tokens.rotate("default").unwrap();
        assert_eq!((rotated.name.as_str(), new.as_str()), ("default", shown(folder.path()).as_str()));
        assert!(tokens.find(&first, 0).is_err() && tokens.find(&new, 0).is_ok());
        assert_eq!(tokens.list().iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["default", "ci"]);
        tokens.remove("ci").unwrap();
        assert_eq!(tokens.find(&other, 0), Err(TokenError::Unknown));
        assert_eq!(tokens.remove("ci").unwrap_err().code(), Code::TokenNotFound);
        assert_eq!(tokens.remove("default").unwrap_err().code(), Code::NameReserved);
    }

    #[test]
    fn unusable_names_and_numbers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = open(folder.path()).unwrap();
        for (bad, code) in [
            (order("../x"), Code::InvalidRequest),
            (order("local"), Code::NameReserved),
            (order("default"), Code::NameReserved),
            (TokenSpec { owner: Some("*".into()), ..order("a") }, Code::InvalidRequest),
            (TokenSpec { expires_in_secs: Some(0), ..order("a") }, Code::InvalidRequest),
            (TokenSpec { expires_in_secs: Some(u64::MAX), ..order("a") }, Code::InvalidRequest),
            (
                TokenSpec {
                    quota: Quota { max_snapshots: Some(u64::MAX), ..Quota::default() },
                    ..order("a")
                },
                Code::InvalidRequest,
            ),
        ] {
            assert_eq!(tokens.add(bad, 0).unwrap_err().code(), code);
        }
        tokens.add(order("a"), 0).unwrap();
        assert_eq!(tokens.add(order("a"), 0).unwrap_err().code(), Code::NameTaken);
    }
}
