//! What the daemon tells about itself: figures for a monitoring system ([`metrics`]), who asked for what
//! ([`audit`]), what happened ([`events`]), and how long it took ([`trace`]).
//!
//! It is told; it looks at nothing itself and changes nothing. Whoever does something tells it once, at the
//! one place where that is done. Nothing here may hold up or fail the work that is told about.

pub(crate) mod audit;
pub(crate) mod events;
pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod prometheus;

use std::sync::Arc;

use audit::Audit;
use events::Events;
use metrics::Metrics;

use crate::config::Config;
use crate::error::Result;
use crate::telemetry::otlp::Traces;

/// Everything that is told about.
#[derive(Debug)]
pub(crate) struct Telemetry {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) audit: Audit,
    pub(crate) events: Events,
    pub(crate) traces: Traces,
}

impl Telemetry {
    /// Must be called in a runtime. Fails if there is no audit log to write to.
    pub(crate) fn open(config: &Config) -> Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::new());
        let path = config.audit_log.clone().unwrap_or_else(|| config.data_dir.join("audit.log"));
        Ok(Arc::new(Telemetry {
            audit: Audit::open(path, metrics.clone())?,
            events: Events::new(metrics.clone())?,
            traces: Traces::open(config.otlp_endpoint.as_deref(), metrics.clone())?,
            metrics,
        }))
    }

    /// Writes down what is still under way.
    pub(crate) async fn close(&self) {
        tokio::join!(self.audit.close(), self.traces.close());
    }
}
