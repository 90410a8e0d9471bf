//! What the guests of the monitor's own tests boot from: the library's kernel, our initramfs, and the
//! disk of the `python` image.

use std::path::PathBuf;
use std::sync::OnceLock;

use forkd_image::{GUEST_MODULES, Library, build_initramfs};
use forkd_protocol::init::{InitPlan, InterfacePlan};
use forkd_tests::monitor::Guest;
use forkd_tests::{binary, library_path};

pub(crate) struct Assets {
    pub(crate) elf: PathBuf,
    pub(crate) bzimage: PathBuf,
    pub(crate) initramfs: Vec<u8>,
    pub(crate) disk: PathBuf,
}

impl Assets {
    /// A guest with our kernel and initramfs; the test adds the rest.
    pub(crate) fn guest(&self) -> Guest<'_> {
        Guest { initramfs: Some(&self.initramfs), ..Guest::new(&self.elf) }
    }
}

pub(crate) fn assets() -> &'static Assets {
    static ASSETS: OnceLock<Assets> = OnceLock::new();
    ASSETS.get_or_init(|| {
        let library = Library::open(&library_path());
        let kernel = library.kernel(None).unwrap();
        let network = InterfacePlan { name: "eth0".into(), address: "10.42.0.2/24".into(), gateway: None };
        let plan = InitPlan { hostname: "guest".into(), network: vec![network], ..InitPlan::default() };
        Assets {
            elf: kernel.image.clone(),
            bzimage: kernel.bzimage.clone().unwrap(),
            initramfs: build_initramfs(&binary("forkd-guest"), &kernel, GUEST_MODULES, plan).unwrap(),
            disk: library.image("python").unwrap().disk,
        }
    })
}
