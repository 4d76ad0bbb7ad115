//! The rest of a transformer: norm, rotary and token embeddings, losses, router, optimizer.

mod embed;
mod loss;
mod norm;
mod optim;
mod router;

pub use embed::{RopeSpec, RopeStyle, embedding, embedding_bwd, rope, rope_bwd};
pub use loss::{CrossEntropy, IGNORE, cross_entropy, cross_entropy_bwd, log_softmax, softmax};
pub use norm::{rms_norm, rms_norm_bwd};
pub use optim::{AdamW, AdamWState, adamw_step, clip_grad_norm, grad_norm};
pub use router::{RouterOut, load_balancing_loss, router, router_bwd};
