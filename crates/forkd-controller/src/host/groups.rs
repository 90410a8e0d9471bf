//! Membership in a group of this host, from the system's name services: local files and directory services.
//!
//! Calls block, as a lookup may ask a server.

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;

/// The initial buffer size for an entry.
const ROOM: usize = 1 << 10;
/// The maximal buffer size for an entry: enough for a group of a hundred thousand members.
const MAX_ROOM: usize = 1 << 22;
/// The most groups of a user that are read; the kernel allows no more.
const MAX_GROUPS: usize = 1 << 16;

/// A group's fields that matter here.
struct Group {
    id: u32,
    members: Vec<CString>,
}

/// A user's fields that matter here.
struct User {
    name: CString,
    /// The id of the primary group.
    group: u32,
}

/// The id of group `name`; none if there is no such group.
pub(crate) fn id_of(name: &str) -> io::Result<Option<u32>> {
    Ok(group(name)?.map(|group| group.id))
}

/// Whether the user `uid` belongs to group `name`: as a listed member, or because it is the primary group.
pub(crate) fn has_member(name: &str, uid: u32) -> io::Result<bool> {
    let Some(group) = group(name)? else { return Ok(false) };
    let Some(user) = user(uid)? else { return Ok(false) };
    if user.group == group.id || group.members.contains(&user.name) {
        return Ok(true);
    }
    // A directory service may list the groups of a user, and not the members of a group.
    Ok(groups_of(&user)?.contains(&group.id))
}

fn group(name: &str) -> io::Result<Option<Group>> {
    let name = CString::new(name)?;
    find(
        |entry: *mut libc::group, room, found| {
            // SAFETY: `name` is a string that lives, `entry` and `found` point to memory for one value each, and
            // `room` is as long as it says.
            unsafe { libc::getgrnam_r(name.as_ptr(), entry, room.as_mut_ptr(), room.len(), found) }
        },
        |entry| Group {
            id: entry.gr_gid,
            // SAFETY: the call found the entry, so its list of members is a valid one.
            members: unsafe { strings(entry.gr_mem) },
        },
    )
}

fn user(uid: u32) -> io::Result<Option<User>> {
    find(
        |entry: *mut libc::passwd, room, found| {
            // SAFETY: `entry` and `found` point to memory for one value each, and `room` is as long as it says.
            unsafe { libc::getpwuid_r(uid, entry, room.as_mut_ptr(), room.len(), found) }
        },
        |entry| User {
            // SAFETY: the call found the entry, so its name is a string.
            name: unsafe { CStr::from_ptr(entry.pw_name) }.to_owned(),
            group: entry.pw_gid,
        },
    )
}

/// Calls one of the `get…_r` functions with a buffer as large as it needs. `read` copies the entry.
fn find<E, T>(
    call: impl Fn(*mut E, &mut [libc::c_char], *mut *mut E) -> libc::c_int,
    read: impl FnOnce(&E) -> T,
) -> io::Result<Option<T>> {
    let mut room = vec![0; ROOM];
    loop {
        let mut entry = MaybeUninit::<E>::uninit();
        let mut found = std::ptr::null_mut();
        match call(entry.as_mut_ptr(), &mut room, &mut found) {
            // SAFETY: where something was found, `entry` was filled and `found` points to it. What it points to
            // is in `room`, which lives until after the call of `read`.
            0 if !found.is_null() => return Ok(Some(read(unsafe { entry.assume_init_ref() }))),
            // Some services report a missing entry this way.
            0 | libc::ENOENT | libc::ESRCH => return Ok(None),
            libc::ERANGE if room.len() < MAX_ROOM => room = vec![0; room.len() * 4],
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// All groups of a user.
fn groups_of(user: &User) -> io::Result<Vec<u32>> {
    let mut groups = vec![0; 64];
    loop {
        let mut count = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the name is a string that lives, and there is room for `count` ids.
        let fit =
            unsafe { libc::getgrouplist(user.name.as_ptr(), user.group, groups.as_mut_ptr(), &mut count) };
        if fit >= 0 {
            groups.truncate(usize::try_from(count).unwrap_or(0));
            return Ok(groups);
        }
        if groups.len() >= MAX_GROUPS {
            return Err(io::Error::other(
                "the user is in more groups than the kernel allows; remove it from some",
            ));
        }
        let wanted = usize::try_from(count).unwrap_or(0).max(groups.len() * 2);
        groups = vec![0; wanted.min(MAX_GROUPS)];
    }
}

/// Copies a list of strings.
///
/// # Safety
///
/// `list` must be null, or point to pointers to strings of which the last one is null.
unsafe fn strings(mut list: *mut *mut libc::c_char) -> Vec<CString> {
    let mut copied = Vec::new();
    if list.is_null() {
        return copied;
    }
    // SAFETY: by this function's contract `list` points to a pointer, and to another one until that is null.
    while let Some(text) = unsafe { list.as_ref() }.filter(|text| !text.is_null()) {
        // SAFETY: by this function's contract it is a string.
        copied.push(unsafe { CStr::from_ptr(*text) }.to_owned());
        // SAFETY: this pointer was not null, so there is another one.
        list = unsafe { list.add(1) };
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Command;

    /// Set in the process with its own users and groups.
    const INSIDE: &str = "FORKD_TEST_GROUPS";

    #[test]
    fn root_is_found_in_its_own_group_and_in_no_other() {
        assert_eq!(id_of("root").unwrap(), Some(0));
        assert!(has_member("root", 0).unwrap());
        assert_eq!(id_of("no-such-group-of-forkd").unwrap(), None);
        assert!(!has_member("no-such-group-of-forkd", 0).unwrap());
        assert!(!has_member("root", 3_999_999_999).unwrap(), "there is no such user");
        assert!(id_of("a\0b").is_err());
    }

    /// The part of the test that runs in the process with its own users and groups.
    #[test]
    fn inside() {
        if std::env::var_os(INSIDE).is_none() {
            return;
        }
        assert_eq!(id_of("forkd").unwrap(), Some(60042));
        let members: Vec<u32> = (60040..60050).filter(|uid| has_member("forkd", *uid).unwrap()).collect();
        assert_eq!(members, [60043, 60044, 60046, 60047]);
        assert!(!has_member("forkd", 0).unwrap());
    }

    /// In its own mount namespace, where users and groups come from a service beside the local files.
    #[test]
    fn members_come_from_every_service_that_the_system_asks() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let link = |from: &str, to: &str| std::os::unix::fs::symlink(from, folder.path().join(to)).unwrap();
        std::fs::create_dir(folder.path().join("userdb")).unwrap();
        let user = |name: &str, uid: u32, gid: u32| {
            let record =
                format!(r#"{{"userName":"{name}","uid":{uid},"gid":{gid},"disposition":"regular"}}"#);
            write(&format!("userdb/{name}.user"), &record);
            link(&format!("{name}.user"), &format!("userdb/{uid}.user"));
        };
        // Ann is listed, bob has the group as primary group, eve is not in it.
        user("ann", 60043, 60043);
        user("bob", 60044, 60042);
        user("eve", 60045, 60045);
        let record = r#"{"groupName":"forkd","gid":60042,"members":["ann","fay"],"disposition":"regular"}"#;
        write("userdb/forkd.group", record);
        link("forkd.group", "userdb/60042.group");
        // Fay and gus are local users in the group, and carl is a local user outside of it.
        let local = "root:x:0:0:root:/root:/bin/sh\nfay:x:60046:60046::/:/bin/sh\ngus:x:60047:60042::/:/bin/sh\n\
                     carl:x:60048:60048::/:/bin/sh\n";
        write("passwd", local);
        write("group", "root:x:0:\n");
        write("nsswitch.conf", "passwd: files systemd\ngroup: files systemd\ninitgroups: files systemd\n");
        let script = "for file in passwd group nsswitch.conf; do mount --bind \"$1/$file\" \"/etc/$file\" || exit 9; done
             mount -t tmpfs tmpfs /run && cp -a \"$1/userdb\" /run/userdb || exit 9
             getent -s systemd group forkd > /dev/null || exit 9
             exec \"$2\" --exact groups::tests::inside --nocapture";
        let ran = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, "sh"])
            .args([folder.path(), &std::env::current_exe().unwrap()])
            .env(INSIDE, "1")
            .output();
        match ran {
            Ok(ran) if ran.status.success() => {}
            Ok(ran) if ran.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&ran.stderr)),
            other => {
                // Needs root, util-linux and systemd's module.
                let _ = writeln!(std::io::stderr(), "NOT RUN: users of another service: {other:?}");
            }
        }
    }
}
