//! Users and groups, from the image's own `/etc/passwd` and `/etc/group`, and acting as one of them.
//!
//! Read by hand: a statically linked binary must not load the image's NSS modules.

use std::{
    io,
    marker::PhantomData,
    path::{Path, PathBuf},
};

use forkd_protocol::connect::{Code, Error};
use rustix::fs::Gid;

use crate::sys;

/// The most that is read of a user or group file.
const FILE_LIMIT: u64 = 4 << 20;
/// The most supplementary groups that every kernel takes.
const MAX_GROUPS: usize = 1024;

/// A user that a command can run as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// All groups, the primary one among them.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: String,
    pub(crate) shell: String,
}

impl User {
    /// Finds a user by name or by number. A number without an entry is a user with no name, no
    /// home and no rights but its own.
    pub(crate) fn find(spec: &str) -> Result<User, Error> {
        let passwd = read_lossy("/etc/passwd");
        let group = read_lossy("/etc/group");
        lookup(spec, &passwd, &group).ok_or_else(|| {
            let message = format!("there is no user {spec:?} in this image");
            Error::new(Code::Unauthenticated, message)
        })
    }

    /// An absolute path from one the user wrote: relative ones and `~` start at the home.
    pub(crate) fn resolve(&self, path: &str) -> Result<PathBuf, Error> {
        if path.contains('\0') {
            return Err(Error::new(Code::InvalidArgument, "a path cannot hold a NUL byte"));
        }
        let home = Path::new(if self.home.starts_with('/') { self.home.as_str() } else { "/" });
        let relative = match path {
            "~" => "",
            _ => path.strip_prefix("~/").unwrap_or(path),
        };
        // Joining an absolute path replaces the home. Components drop `.` and doubled slashes, and
        // keep `..`: what that means depends on links, so it is left to the kernel.
        Ok(home.join(relative).components().collect())
    }
}

/// Names for the ids of files, read once for a whole listing.
pub(crate) struct IdNames {
    passwd: String,
    group: String,
}

impl IdNames {
    pub(crate) fn load() -> Self {
        IdNames { passwd: read_lossy("/etc/passwd"), group: read_lossy("/etc/group") }
    }

    /// Name of a user; the number itself when it has none.
    pub(crate) fn user(&self, uid: u32) -> String {
        name_of(&self.passwd, uid)
    }

    /// Name of a group; the number itself when it has none.
    pub(crate) fn group(&self, gid: u32) -> String {
        name_of(&self.group, gid)
    }
}

fn name_of(file: &str, id: u32) -> String {
    let entry = file.lines().map(|line| line.split(':')).find_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_string())
    });
    entry.unwrap_or_else(|| id.to_string())
}

fn read_lossy(path: &str) -> String {
    let bytes = sys::read_small_file(Path::new(path), FILE_LIMIT).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A user or group id. The largest number means "unchanged" to the kernel: a process started as that
/// user would stay root.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id < u32::MAX - 1)
}

fn lookup(spec: &str, passwd: &str, group: &str) -> Option<User> {
    let number = id(spec);
    let found = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
        let (uid, gid) = (id(uid)?, id(gid)?);
        let wanted = name == spec || number == Some(uid);
        wanted.then(|| (name.to_string(), uid, gid, home.to_string(), shell.to_string()))
    });
    let (name, uid, gid, home, shell) = match found {
        Some(found) => found,
        // Root exists in every image, even in one with nothing but a program in it.
        None if spec == "root" || number == Some(0) => {
            ("root".into(), 0, 0, "/root".into(), "/bin/sh".into())
        }
        None => (spec.to_string(), number?, number?, "/".into(), "/bin/sh".into()),
    };
    let mut groups = vec![gid];
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, id, members] = fields[..] else { continue };
        let Some(id) = self::id(id) else { continue };
        if members.split(',').any(|member| member == name)
            && !groups.contains(&id)
            && groups.len() < MAX_GROUPS
        {
            groups.push(id);
        }
    }
    Some(User { name, uid, gid, groups, home, shell })
}

/// While it lives, the calling thread has a user's permissions on files, and files it makes are
/// that user's.
pub(crate) struct ActingAs {
    /// Bound to the thread that made it.
    _not_send: PhantomData<*const ()>,
}

/// Makes the calling thread act as `user` on files.
pub(crate) fn act_as(user: &User) -> io::Result<ActingAs> {
    let acting = ActingAs { _not_send: PhantomData };
    let groups: Vec<Gid> = user.groups.iter().map(|id| Gid::from_raw(*id)).collect();
    // Groups first: that needs a capability which goes when the user changes.
    rustix::thread::set_thread_groups(&groups)?;
    sys::set_thread_fs_ids(user.uid, user.gid)?;
    Ok(acting)
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        // The agent is root: this cannot fail, and if it did the thread would only have fewer rights.
        let _ = sys::set_thread_fs_ids(0, 0);
        let _ = rustix::thread::set_thread_groups(&[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\ngarbage\nuser:x:1000:1000::/home/user:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nuser:x:1000:\nsudo:x:27:user,other\naudio:x:29:other\n";

    #[test]
    fn users_are_found_by_name_and_by_number() {
        let user = lookup("user", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (1000, 1000, "/home/user"));
        assert_eq!(user.groups, [1000, 27]);
        assert_eq!(lookup("1000", PASSWD, GROUP).unwrap(), user);
        assert_eq!(lookup("nobody", PASSWD, GROUP), None);
    }

    #[test]
    fn an_image_without_user_files_still_has_root_and_numbers() {
        assert_eq!(lookup("root", "", "").unwrap().uid, 0);
        let user = lookup("4711", "", "").unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (4711, 4711, "/"));
        assert_eq!(lookup("4294967295", "", ""), None);
        assert_eq!(lookup("", "", ""), None);
        assert_eq!(lookup("-1", "", ""), None);
    }

    #[test]
    fn a_number_that_would_leave_a_process_root_is_nobodys() {
        for passwd in ["x:x:4294967295:1000::/:/bin/sh\n", "x:x:1000:4294967295::/:/bin/sh\n"] {
            assert_eq!(lookup("x", passwd, ""), None);
        }
    }

    #[test]
    fn relative_paths_start_at_the_home() {
        let user = lookup("user", PASSWD, GROUP).unwrap();
        for (path, absolute) in [
            ("a/b", "/home/user/a/b"),
            ("~/a", "/home/user/a"),
            ("~", "/home/user"),
            ("", "/home/user"),
            ("/etc//x/.", "/etc/x"),
            ("~other", "/home/user/~other"),
        ] {
            assert_eq!(user.resolve(path).unwrap(), Path::new(absolute), "{path}");
        }
        assert!(user.resolve("a\0b").is_err());
    }

    #[test]
    fn a_thread_that_acted_as_a_user_is_itself_again_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "x").unwrap();
        std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let nobody = lookup("65534", "", "").unwrap();
        {
            let _acting = act_as(&nobody).unwrap();
            assert_eq!(std::fs::read(&secret).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        }
        assert_eq!(std::fs::read(&secret).unwrap(), b"x");
    }
}
