//! Rate limits: requests per token, and failed authentications per address. The memory of both is bounded.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// As many tokens, or addresses, are told apart.
const MAX_KNOWN: usize = 4096;
/// The most failures per window that get the answer 401; more get 429.
const FAILURES: u32 = 20;
/// The length of the window.
const WINDOW: Duration = Duration::from_secs(60);

/// A token bucket per principal: it fills at a constant rate, and each request takes one out.
#[derive(Debug)]
pub(crate) struct Rates {
    per_sec: f64,
    buckets: Mutex<HashMap<String, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    /// Allows `per_sec` requests a second, and twice as many at once; 0 is no limit.
    pub(crate) fn new(per_sec: u32) -> Self {
        Rates { per_sec: f64::from(per_sec), buckets: Mutex::default() }
    }

    /// Counts a request of `name`. If there were too many, returns how long to wait before the next request.
    pub(crate) fn take(&self, name: &str, now: Instant) -> Result<(), Duration> {
        if self.per_sec == 0.0 {
            return Ok(());
        }
        let full = 2.0 * self.per_sec;
        let filled = |bucket: &Bucket| {
            let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
            (bucket.left + passed * self.per_sec).min(full)
        };
        let mut buckets = self.buckets.lock();
        // A full bucket says nothing that an absent one does not.
        if buckets.len() >= MAX_KNOWN && !buckets.contains_key(name) {
            buckets.retain(|_, bucket| filled(bucket) < full);
            drop_oldest(&mut buckets, |bucket| bucket.at);
        }
        let left = buckets.get(name).map_or(full, filled);
        if left < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - left) / self.per_sec));
        }
        buckets.insert(name.to_owned(), Bucket { left: left - 1.0, at: now });
        Ok(())
    }
}

/// The failed authentications (a wrong token, or none) of each address.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<HashMap<IpAddr, Failed>>);

#[derive(Debug, Clone, Copy)]
struct Failed {
    count: u32,
    since: Instant,
}

impl Failures {
    /// Counts a failure. If there were too many, returns how long the address has to wait.
    pub(crate) fn count(&self, peer: IpAddr, now: Instant) -> Result<(), Duration> {
        let over = |failed: &Failed| now.saturating_duration_since(failed.since) >= WINDOW;
        let mut all = self.0.lock();
        let peer = subnet(peer);
        if all.len() >= MAX_KNOWN && !all.contains_key(&peer) {
            all.retain(|_, failed| !over(failed));
            drop_oldest(&mut all, |failed| failed.since);
        }
        let failed = all.entry(peer).or_insert(Failed { count: 0, since: now });
        if over(failed) {
            *failed = Failed { count: 0, since: now };
        }
        failed.count = failed.count.saturating_add(1);
        match failed.count > FAILURES {
            true => Err(WINDOW - now.saturating_duration_since(failed.since)),
            false => Ok(()),
        }
    }
}

/// Makes room for one more.
fn drop_oldest<K: Clone + Eq + Hash, V>(all: &mut HashMap<K, V>, age: impl Fn(&V) -> Instant) {
    if all.len() < MAX_KNOWN {
        return;
    }
    let oldest = all.iter().min_by_key(|(_, value)| age(value)).map(|(key, _)| key.clone());
    oldest.map(|key| all.remove(&key));
}

/// The network of an IPv6 address: a client with one IPv6 address has 2^64 of them.
fn subnet(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => address.into(),
            None => IpAddr::from((u128::from(address) & !u128::from(u64::MAX)).to_be_bytes()),
        },
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_served_and_then_as_many_as_are_allowed() {
        let (rates, begun) = (Rates::new(10), Instant::now());
        assert_eq!((0..100).filter(|_| rates.take("ann", begun).is_ok()).count(), 20);
        let wait = rates.take("ann", begun).unwrap_err();
        assert!(wait > Duration::from_millis(90) && wait <= Duration::from_millis(100), "{wait:?}");
        assert!(rates.take("bob", begun).is_ok(), "others do not notice");
        let later = begun + Duration::from_secs(1);
        assert_eq!((0..100).filter(|_| rates.take("ann", later).is_ok()).count(), 10);
        assert!((0..1000).all(|_| Rates::new(0).take("ann", begun).is_ok()), "0 is no limit");
    }

    #[test]
    fn guesses_are_counted_for_a_minute_by_address_and_by_network_of_version_6() {
        let (failures, begun) = (Failures::default(), Instant::now());
        let count = |peer: &str, at| failures.count(peer.parse().unwrap(), at);
        assert_eq!((0..50).filter(|_| count("192.0.2.1", begun).is_ok()).count(), 20);
        assert_eq!(count("192.0.2.1", begun + Duration::from_secs(50)), Err(Duration::from_secs(10)));
        assert!(count("::ffff:192.0.2.1", begun).is_err(), "the same address");
        assert!(count("192.0.2.2", begun).is_ok());
        assert!(count("192.0.2.1", begun + WINDOW).is_ok());
        let of_one_network = |n: u32| count(&format!("2001:db8::{n:x}"), begun).is_ok();
        assert_eq!((0..50).filter(|n| of_one_network(*n)).count(), 20);
        assert!(count("2001:db8:0:1::1", begun).is_ok());
    }

    #[test]
    fn memory_is_bounded_however_many_ask() {
        let (rates, failures, begun) = (Rates::new(1), Failures::default(), Instant::now());
        for n in 0..2 * MAX_KNOWN as u32 {
            let at = begun + Duration::from_micros(n.into());
            let _ = rates.take(&n.to_string(), at);
            let _ = failures.count(IpAddr::from(n.to_be_bytes()), at);
        }
        assert_eq!(rates.buckets.lock().len(), MAX_KNOWN);
        assert_eq!(failures.0.lock().len(), MAX_KNOWN);
    }
}
