//! Plans without a world, by their description and the device that they are prepared for.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use foldhash::fast::RandomState;
use tilewire::device::Device;
use tilewire::ops::grouped_gemm::GroupedDesc;
use tilewire::ops::permute::PermuteDesc;
use tilewire::ops::quant::{DequantDesc, QuantDesc};
use tilewire::prelude::*;

use crate::keys::AttnKey;
use crate::ops::attention::Order;

/// Everything that local plans differ in.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum LocalKey {
    Grouped(GroupedDesc),
    Attention(AttnKey, Order),
    Quant(QuantDesc),
    Dequant(DequantDesc),
    Permute(PermuteDesc),
}

type Place = Option<u32>;
type Plan = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct Held {
    plans: HashMap<(LocalKey, Place), Plan, RandomState>,
    order: VecDeque<(LocalKey, Place)>,
}

static HELD: Mutex<Option<Held>> = Mutex::new(None);

/// So many are kept; then the oldest goes.
const MOST: usize = 1024;

/// The plan of `key` on `device`, made and prepared by `make` if there is none.
///
/// # Errors
/// `NotPrepared` if there is none and `stream` is being captured; what `make` reports.
pub fn plan<P: Any + Send + Sync>(
    key: LocalKey,
    device: &Device,
    stream: &Stream,
    make: impl FnOnce() -> Result<P>,
) -> Result<Arc<P>> {
    let place = match device {
        Device::Host => None,
        Device::Cuda(ctx) => Some(ctx.ordinal()),
    };
    let key = (key, place);
    let held = || HELD.lock().unwrap_or_else(PoisonError::into_inner);
    let found = held().as_ref().and_then(|h| h.plans.get(&key).cloned());
    let plan = match found {
        Some(plan) => plan,
        None if stream.is_capturing() => {
            return Err(Error::new(
                ErrorKind::NotPrepared,
                "this call needs a new plan, which cannot be made during a capture",
            )
            .hint("call it once with these shapes before the capture begins"));
        }
        None => {
            // Not under the lock: it may compile.
            let plan: Plan = Arc::new(make()?);
            let mut held = held();
            let held = held.get_or_insert_default();
            held.plans.insert(key.clone(), plan.clone());
            held.order.push_back(key);
            if held.order.len() > MOST
                && let Some(oldest) = held.order.pop_front()
            {
                held.plans.remove(&oldest);
            }
            plan
        }
    };
    plan.downcast().map_err(|_| Error::internal("one key names plans of two types"))
}
