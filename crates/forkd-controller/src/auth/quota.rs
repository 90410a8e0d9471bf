//! Quotas: how much each owner uses and may use. Callers hold a lock from the check to the count, so that two requests
//! cannot both take the last free place.

use std::collections::HashMap;

use forkd_store::Quota;

use crate::error::{Code, Error, Result};

/// What one sandbox counts against its owner's quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) owner: String,
    pub(crate) mem_mib: u64,
}

/// The usage of all owners.
#[derive(Debug, Default)]
pub(crate) struct QuotaUsage(HashMap<String, Used>);

#[derive(Debug, Default, Clone, Copy)]
struct Used {
    sandboxes: u64,
    mem_mib: u64,
}

impl QuotaUsage {
    /// Counts `fitting` sandboxes, the ones that fit the host, if the quota has room for `wanted`.
    pub(crate) fn take(&mut self, claim: &Claim, wanted: usize, fitting: usize, quota: &Quota) -> Result<()> {
        let used = self.0.get(&claim.owner).copied().unwrap_or_default();
        let after = |n: usize| {
            let n = n as u64;
            let mem_mib = used.mem_mib.saturating_add(n.saturating_mul(claim.mem_mib));
            Used { sandboxes: used.sandboxes.saturating_add(n), mem_mib }
        };
        check(&claim.owner, used, after(wanted), quota)?;
        self.0.insert(claim.owner.clone(), after(fitting));
        Ok(())
    }

    /// Counts a sandbox that becomes larger or smaller, if the quota has room for it.
    pub(crate) fn resize(&mut self, claim: &mut Claim, mem_mib: u64, quota: &Quota) -> Result<()> {
        let used = self.0.get(&claim.owner).copied().unwrap_or_default();
        let rest = used.mem_mib.saturating_sub(claim.mem_mib);
        let after = Used { mem_mib: rest.saturating_add(mem_mib), ..used };
        if mem_mib > claim.mem_mib {
            // The number of sandboxes does not change, so its limit is not checked.
            check(&claim.owner, used, after, &Quota { max_sandboxes: None, ..*quota })?;
        }
        self.0.insert(claim.owner.clone(), after);
        claim.mem_mib = mem_mib;
        Ok(())
    }

    pub(crate) fn release(&mut self, claim: &Claim) {
        let Some(used) = self.0.get_mut(&claim.owner) else { return };
        used.sandboxes = used.sandboxes.saturating_sub(1);
        used.mem_mib = used.mem_mib.saturating_sub(claim.mem_mib);
        // Owners without sandboxes take no memory.
        if used.sandboxes == 0 {
            self.0.remove(&claim.owner);
        }
    }
}

fn check(owner: &str, used: Used, after: Used, quota: &Quota) -> Result<()> {
    if let Some(max) = quota.max_sandboxes.filter(|max| after.sandboxes > *max) {
        let (have, want) = (used.sandboxes, after.sandboxes - used.sandboxes);
        return Err(Error::new(
            Code::QuotaExceeded,
            format!(
                "{owner} has {have} sandboxes and may have {max} (max_sandboxes), so there is no room for {want} \
             more; delete some, or have the token's limit raised"
            ),
        ));
    }
    if let Some(max) = quota.max_memory_mib.filter(|max| after.mem_mib > *max) {
        let (have, want) = (used.mem_mib, after.mem_mib.saturating_sub(used.mem_mib));
        return Err(Error::new(
            Code::QuotaExceeded,
            format!(
                "the sandboxes of {owner} have {have} MiB and may have {max} (max_memory_mib), so there is no room \
             for {want} MiB more; delete some, or have the token's limit raised"
            ),
        ));
    }
    Ok(())
}

/// Checks whether `owner`, with `have` snapshots, may have another one, of a guest with `mem_mib` MiB.
pub(crate) fn check_snapshots(owner: &str, have: usize, mem_mib: u64, quota: &Quota) -> Result<()> {
    if let Some(max) = quota.max_snapshots.filter(|max| have as u64 >= *max) {
        return Err(Error::new(
            Code::QuotaExceeded,
            format!(
                "{owner} has {have} snapshots and forks, and may have {max} (max_snapshots); remove some with \
                 `forkd rmi`, end the children of a fork, or have the token's limit raised"
            ),
        ));
    }
    if let Some(max) = quota.max_memory_mib.filter(|max| mem_mib > *max) {
        return Err(Error::new(
            Code::QuotaExceeded,
            format!(
                "a guest of {mem_mib} MiB is more than {owner} may have, {max} MiB (max_memory_mib); ask for a \
             smaller one, or have the token's limit raised"
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_never_more_than_may_be_and_comes_back() {
        let mut usage = QuotaUsage::default();
        let quota = Quota { max_sandboxes: Some(3), max_memory_mib: Some(300), max_snapshots: None };
        let mut claim = Claim { owner: "ann".into(), mem_mib: 100 };
        usage.take(&claim, 2, 2, &quota).unwrap();
        let error = usage.take(&claim, 2, 2, &quota).unwrap_err();
        assert!(error.code() == Code::QuotaExceeded && error.public().contains("max_sandboxes"), "{error}");
        let large = Claim { mem_mib: 101, ..claim.clone() };
        let error = usage.take(&large, 1, 1, &quota).unwrap_err();
        assert!(error.public().contains("max_memory_mib") && error.public().contains("200"), "{error}");
        let other = Claim { owner: "bob".into(), ..claim.clone() };
        usage.take(&other, 3, 3, &quota).unwrap();
        // Of the sandboxes that fit the quota only those that fit the host are counted.
        usage.take(&claim, 1, 0, &quota).unwrap();
        usage.take(&claim, 1, 1, &quota).unwrap();
        assert!(usage.resize(&mut claim, 101, &quota).is_err());
        usage.resize(&mut claim, 50, &quota).unwrap();
        usage.resize(&mut claim, 100, &quota).unwrap();
        (0..3).for_each(|_| usage.release(&claim));
        (0..3).for_each(|_| usage.release(&other));
        assert!(usage.0.is_empty());
        let tiny = Quota { max_sandboxes: Some(0), ..Quota::default() };
        assert!(usage.take(&claim, 1, 1, &tiny).is_err());
        assert!(usage.take(&claim, usize::MAX, 1, &Quota::default()).is_ok(), "no limit is no limit");
    }
}
