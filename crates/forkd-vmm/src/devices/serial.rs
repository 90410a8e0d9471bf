//! The serial console: a 16550 whose output goes to a log with a size limit.
//!
//! [`ConsoleLog`] keeps the last output of a guest that has ended: it is reported, and a kernel's panic
//! message is picked out of it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::NoEvents;
use vmm_sys_util::eventfd::EventFd;

use crate::state::SerialState;
use crate::{Error, Result};

/// How much of a line is held back until it is complete. Longer lines are written in parts.
const LINE: usize = 512;
/// How much input a port holds.
const INPUT: usize = 64;
/// How much is moved at once when the log makes room.
const CHUNK: usize = 64 << 10;
/// The beginning of a Linux kernel's panic message.
const PANIC: &str = "Kernel panic - not syncing: ";

/// The console's output, in a file that is never longer than its limit: when it is full, its newer
/// half is moved to the front, and the older half is gone.
#[derive(Debug)]
pub struct ConsoleLog {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Open for reading (to move what is kept) and writing.
    file: File,
    limit: u64,
    /// Bytes in the file.
    len: u64,
    /// The present line, or part of it; at most [`LINE`] bytes.
    line: Vec<u8>,
    panic: Option<String>,
}

impl ConsoleLog {
    /// A log in `file`, which is open for reading and writing and is emptied, of at most `limit`
    /// bytes.
    pub fn new(file: File, limit: u64) -> io::Result<ConsoleLog> {
        file.set_len(0)?;
        let inner = Inner { file, limit, len: 0, line: Vec::new(), panic: None };
        Ok(ConsoleLog { inner: Mutex::new(inner) })
    }

    /// The end of the output, at most `max` bytes, with invalid UTF-8 replaced.
    pub fn tail(&self, max: usize) -> String {
        let inner = self.lock();
        let stored = inner.len.min(max as u64);
        let mut bytes = vec![0; stored as usize];
        // A log that cannot be read has no tail; the guest's end is reported all the same.
        if inner.file.read_exact_at(&mut bytes, inner.len - stored).is_err() {
            bytes.clear();
        }
        bytes.extend(&inner.line);
        let mut text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(max)..]).into_owned();
        // A replaced byte takes three: the text may have become too long again.
        let mut start = text.len().saturating_sub(max);
        while !text.is_char_boundary(start) {
            start += 1;
        }
        text.split_off(start)
    }

    /// The line of the guest kernel's panic message, if there is one.
    pub fn panic_message(&self) -> Option<String> {
        let inner = self.lock();
        inner.panic.clone().or_else(|| panic_in(&inner.line))
    }

    fn write_byte(&self, byte: u8) {
        let mut inner = self.lock();
        inner.line.push(byte);
        if byte == b'\n' || inner.line.len() >= LINE {
            inner.end_line();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if self.panic.is_none() {
            self.panic = panic_in(&line);
        }
        // A console that cannot be logged (a full disk) is no reason to stop the guest.
        let _ = self.append(&line);
        self.line = line;
        self.line.clear();
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.len + bytes.len() as u64 > self.limit {
            self.make_room()?;
        }
        let room = self.limit.saturating_sub(self.len);
        let bytes = &bytes[bytes.len().saturating_sub(usize::try_from(room).unwrap_or(usize::MAX))..];
        self.file.write_all_at(bytes, self.len)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Moves the newer half to the front. Half, so that each byte is moved about once.
    fn make_room(&mut self) -> io::Result<()> {
        let keep = self.len.min(self.limit / 2);
        let from = self.len - keep;
        let mut chunk = vec![0; CHUNK.min(keep as usize)];
        let mut moved = 0;
        while moved < keep {
            let count = chunk.len().min((keep - moved) as usize);
            self.file.read_exact_at(&mut chunk[..count], from + moved)?;
            self.file.write_all_at(&chunk[..count], moved)?;
            moved += count as u64;
        }
        self.file.set_len(keep)?;
        self.len = keep;
        Ok(())
    }
}

fn panic_in(line: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(line);
    let start = text.find(PANIC)?;
    Some(text[start..].trim_end().to_owned())
}

/// The serial port. Registers are addressed by their offset from the port's base.
pub struct Serial {
    uart: vm_superio::Serial<Interrupt, NoEvents, Output>,
}

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct Output(Arc<ConsoleLog>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().for_each(|byte| self.0.write_byte(*byte));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Serial {
    /// A port that writes to `log` and raises `interrupt`.
    pub fn new(interrupt: EventFd, log: Arc<ConsoleLog>) -> Serial {
        Serial { uart: vm_superio::Serial::new(Interrupt(interrupt), Output(log)) }
    }

    /// Refuses a state that [`Serial::restore`] does not take.
    pub fn check(state: &SerialState) -> Result<()> {
        let waiting = state.input.len();
        if waiting <= INPUT {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the state's serial port has {waiting} bytes of input, but it holds {INPUT}; make the snapshot again"
        )))
    }

    /// A port with the registers of `state`. Raises its interrupt if that may have been on its way:
    /// without it a guest that waits for room to write would wait for ever.
    pub fn restore(interrupt: EventFd, log: Arc<ConsoleLog>, state: &SerialState) -> io::Result<Serial> {
        let state = vm_superio::serial::SerialState {
            baud_divisor_low: state.baud_divisor.0,
            baud_divisor_high: state.baud_divisor.1,
            interrupt_enable: state.interrupt.0,
            interrupt_identification: state.interrupt.1,
            line_control: state.line.0,
            line_status: state.line.1,
            modem_control: state.modem.0,
            modem_status: state.modem.1,
            scratch: state.scratch,
            in_buffer: state.input.clone(),
        };
        let uart = vm_superio::Serial::from_state(&state, Interrupt(interrupt), NoEvents, Output(log));
        let uart = uart.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{error:?}")))?;
        Ok(Serial { uart })
    }

    /// Its registers.
    pub fn state(&self) -> SerialState {
        let state = self.uart.state();
        SerialState {
            baud_divisor: (state.baud_divisor_low, state.baud_divisor_high),
            interrupt: (state.interrupt_enable, state.interrupt_identification),
            line: (state.line_control, state.line_status),
            modem: (state.modem_control, state.modem_status),
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// The guest reads a register.
    pub fn read(&mut self, offset: u8) -> u8 {
        self.uart.read(offset)
    }

    /// The guest writes a register.
    pub fn write(&mut self, offset: u8, value: u8) {
        // Only raising the interrupt can fail: its counter is then full and raised already.
        let _ = self.uart.write(offset, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    fn port(limit: u64) -> (Serial, Arc<ConsoleLog>, File) {
        let file = tempfile::tempfile().unwrap();
        let log = Arc::new(ConsoleLog::new(file.try_clone().unwrap(), limit).unwrap());
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        (Serial::new(interrupt, Arc::clone(&log)), log, file)
    }

    fn print(serial: &mut Serial, text: &str) {
        text.bytes().for_each(|byte| serial.write(0, byte));
    }

    fn contents(file: &File) -> String {
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn what_the_guest_prints_is_in_the_file_line_by_line_and_in_the_tail_at_once() {
        let (mut serial, log, file) = port(1 << 20);
        print(&mut serial, "first\nsecond");
        assert_eq!(contents(&file), "first\n");
        assert_eq!(log.tail(100), "first\nsecond");
        assert_eq!(log.tail(8), "t\nsecond");
        assert_eq!(log.tail(0), "");
        assert_eq!(log.panic_message(), None);
    }

    #[test]
    fn a_flood_never_outgrows_the_limit_and_its_end_is_kept() {
        let (mut serial, log, file) = port(10_000);
        for number in 0..5000 {
            print(&mut serial, &format!("line {number}\n"));
            assert!(file.metadata().unwrap().len() <= 10_000);
        }
        let kept = contents(&file);
        assert!(kept.len() >= 4000, "at least about half of the limit is kept");
        assert!(kept.ends_with("line 4998\nline 4999\n"));
        assert!(log.tail(10).ends_with("line 4999\n"));
        let lines: Vec<_> = kept.lines().skip(1).collect();
        for pair in lines.windows(2) {
            let number = |line: &str| line[5..].parse::<u32>().unwrap();
            assert_eq!(number(pair[0]) + 1, number(pair[1]), "nothing in between is missing");
        }
    }

    #[test]
    fn a_line_without_end_is_written_in_parts() {
        let (mut serial, log, file) = port(1 << 20);
        print(&mut serial, &"x".repeat(100_000));
        assert!(contents(&file).len() > 99_000);
        assert_eq!(log.tail(200_000).len(), 100_000);
    }

    #[test]
    fn limits_smaller_than_a_line_are_kept_too() {
        for limit in [0, 1, 7, 511, 512, 513] {
            let (mut serial, _log, file) = port(limit);
            print(&mut serial, &"abcdefgh\n".repeat(500));
            print(&mut serial, &"y".repeat(5000));
            assert!(file.metadata().unwrap().len() <= limit, "{limit}");
        }
    }

    #[test]
    fn a_kernel_panic_is_remembered_however_much_follows() {
        let (mut serial, log, _file) = port(4096);
        print(&mut serial, "[    1.2] Kernel panic - not syncing: VFS: Unable to mount root fs\r\n");
        for _ in 0..1000 {
            print(&mut serial, "noise\n");
        }
        print(&mut serial, "Kernel panic - not syncing: another one\n");
        let message = "Kernel panic - not syncing: VFS: Unable to mount root fs";
        assert_eq!(log.panic_message().as_deref(), Some(message));
    }

    #[test]
    fn a_panic_that_never_ended_its_line_is_found() {
        let (mut serial, log, _file) = port(4096);
        print(&mut serial, "Kernel panic - not syncing: Attempted to kill init!");
        assert!(log.panic_message().unwrap().ends_with("kill init!"));
    }

    #[test]
    fn bytes_that_are_no_text_do_not_make_the_tail_longer_than_asked() {
        let (mut serial, log, _file) = port(4096);
        (0..1000).for_each(|byte| serial.write(0, (byte % 256) as u8 | 0x80));
        for max in [0, 1, 2, 3, 100, 4096] {
            assert!(log.tail(max).len() <= max);
        }
    }

    #[test]
    fn every_register_can_be_read_and_written() {
        let (mut serial, _log, _file) = port(4096);
        for offset in 0..=255 {
            for value in 0..=255 {
                serial.write(offset, value);
                serial.read(offset);
            }
        }
    }
}
