//! Progress of a long build.

/// Receives the progress of a build. The CLI draws it; the daemon logs it.
pub trait Progress: Sync {
    /// A new step begins, such as "downloading packages".
    fn step(&self, text: &str);
    /// How much of the current step is done, from 0 to 1. Steps of unknown length never report it.
    fn fraction(&self, _done: f64) {}
    /// A line of detail.
    fn log(&self, _line: &str) {}
}

/// Reports nothing.
pub struct Silent;

impl Progress for Silent {
    fn step(&self, _text: &str) {}
}
