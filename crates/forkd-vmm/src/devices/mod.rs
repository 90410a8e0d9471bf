//! The devices of a microVM, all of them in user space.
//!
//! [`virtio`] holds the block, network, random-number and socket devices and their MMIO transport; the rest
//! are small devices of their own. A device is given descriptors and guest memory, and nothing else: it knows
//! no KVM and no controller, and opens no path.
//!
//! The guest is hostile. Whatever it writes into registers, rings and buffers, a device never
//! panics, never touches memory outside the buffers it was given, does a bounded amount of work per
//! event and holds a bounded amount of memory. A device whose driver breaks the rules asks for a
//! reset and stands still until it gets one.

pub mod generation_id;
pub mod power;
pub mod serial;
pub mod virtio;
