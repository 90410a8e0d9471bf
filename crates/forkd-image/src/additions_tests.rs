use std::collections::BTreeSet;

use super::*;
use crate::library::Lock;
use crate::progress::Silent;

/// A tree with these files, each with a text; those in a folder `bin` can be run.
fn tree(folder: &Path, files: &[(&str, &str)]) -> Tree {
    let root = folder.join("root");
    for (path, text) in files {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        let mode = if path.parent().unwrap().ends_with("bin") { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::create_dir_all(&root).unwrap();
    Tree::scan(&root, 64 << 20).unwrap()
}

fn applied(additions: &Additions, folder: &Path, tree: &mut Tree) -> Result<()> {
    let work = folder.join("work");
    fs::create_dir_all(&work).unwrap();
    let lock = Lock::take(&folder.join("locks"), "x", "x", &Silent).unwrap();
    apply(additions, tree, 64 << 20, &work, &lock, &Silent)
}

fn text(tree: &Tree, path: &str) -> String {
    fs::read_to_string(tree.path.join(path)).unwrap()
}

#[test]
fn the_user_is_added_once_and_may_do_everything() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        [("usr/bin/sudo", ""), ("etc/passwd", "root:x:0:0::/root:/bin/sh"), ("etc/shadow", "root:*:1\n")];
    let mut tree = tree(folder.path(), &files);
    let sudo = Additions { sudo: true, ..Additions::default() };
    for _ in 0..2 {
        applied(&sudo, folder.path(), &mut tree).unwrap();
        let users = text(&tree, "etc/passwd");
        assert_eq!(users, "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n");
        assert_eq!(text(&tree, "etc/group"), "user:x:1000:\n");
        assert_eq!(text(&tree, "etc/shadow").lines().count(), 2);
        let (home, rule) = (tree.node("home/user").unwrap(), tree.node("etc/sudoers.d/user").unwrap());
        assert_eq!((home.uid, home.gid, home.mode & 0o777), (1000, 1000, 0o755));
        assert_eq!((rule.uid, rule.mode & 0o777), (0, 0o440));
        assert!(text(&tree, "etc/sudoers.d/user").contains("NOPASSWD"));
    }
}

#[test]
fn an_image_that_cannot_have_the_user_is_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let sudo = Additions { sudo: true, ..Additions::default() };
    let mut bare = tree(folder.path(), &[("etc/passwd", "root:x:0:0::/root:/bin/sh\n")]);
    let error = applied(&sudo, folder.path(), &mut bare).unwrap_err().to_string();
    assert!(error.contains("--extra sudo"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let files = [("usr/bin/sudo", ""), ("etc/passwd", "node:x:1000:1000::/home/node:/bin/sh\n")];
    let mut taken = tree(folder.path(), &files);
    let error = applied(&sudo, folder.path(), &mut taken).unwrap_err().to_string();
    assert!(error.contains("uid 1000"), "{error}");
}

#[test]
fn files_of_forkd_get_their_owner_and_their_place_beside_the_images_python() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("usr/bin/python3.11", ""), ("usr/lib/python3/dist-packages/x", ""), ("home/user/x", "")];
    let mut tree = tree(folder.path(), &files);
    let before = tree.node("home/user").unwrap();
    let additions = Additions {
        files: vec![
            PlacedFile::text("usr/local/bin/program", 0o755, "#!/bin/sh\n"),
            PlacedFile::folder("home/user/.local/lib/{python}/site-packages", USER_ID),
        ],
        ..Additions::default()
    };
    applied(&additions, folder.path(), &mut tree).unwrap();
    assert!(tree.is_program("usr/local/bin/program"));
    for path in ["home/user/.local", "home/user/.local/lib/python3.11/site-packages"] {
        assert_eq!(tree.node(path).unwrap().uid, 1000, "{path}");
    }
    assert_eq!(tree.node("home/user"), Some(before));
    let python = pip::Python::find(&tree).unwrap();
    assert_eq!(python.name(), "python3.11");
}

#[test]
fn a_link_in_the_image_leads_no_file_out_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut tree = tree(folder.path(), &[("usr/x", "")]);
    let outside = folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    std::os::unix::fs::symlink(&outside, tree.path.join("usr/local")).unwrap();
    let files = vec![PlacedFile::text("usr/local/bin/program", 0o755, "x")];
    let additions = Additions { files, ..Additions::default() };
    // The link leads to a folder of the image that is not there.
    assert!(applied(&additions, folder.path(), &mut tree).is_err());
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}

#[test]
fn wrong_names_are_refused_before_anything_is_fetched() {
    let wrong = |additions: Additions| additions.check().unwrap_err().to_string();
    assert!(wrong(Additions { pip: vec!["./x".into()], ..Additions::default() }).contains("PyPI"));
    assert!(wrong(Additions { npm: vec!["a/b".into()], ..Additions::default() }).contains("npm"));
}

#[test]
fn what_is_copied_from_the_host_is_roots_and_readable() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    fs::create_dir_all(source.join("bin")).unwrap();
    fs::write(source.join("bin/tool"), "x").unwrap();
    fs::set_permissions(source.join("bin/tool"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(source.join("data"), "y").unwrap();
    fs::set_permissions(source.join("data"), fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink("bin/tool", source.join("link")).unwrap();
    let archive = folder.path().join("layer.tar");
    let mut layer = Layer { tar: Builder::new(std::io::BufWriter::new(File::create(&archive).unwrap())) };
    layer.copy(&source, "usr/local", &|path| path != Path::new("nothing")).unwrap();
    layer.tar.into_inner().unwrap().flush().unwrap();
    let mut found = BTreeSet::new();
    let mut tar = tar::Archive::new(File::open(&archive).unwrap());
    for entry in tar.entries().unwrap() {
        let entry = entry.unwrap();
        let header = entry.header();
        found.insert((
            entry.path().unwrap().display().to_string(),
            header.mode().unwrap(),
            header.uid().unwrap(),
        ));
    }
    let expected =
        [("usr/local/bin/tool", 0o755, 0), ("usr/local/data", 0o644, 0), ("usr/local/link", 0o777, 0)];
    assert_eq!(found, expected.map(|(path, mode, uid)| (path.to_owned(), mode, uid)).into());
}
