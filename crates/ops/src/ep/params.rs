//! Parameters of the kernels of expert parallelism, as they lie in `ep/layer.cuh` and `ep/sm80_ep.cu`.

use bytemuck::{Pod, Zeroable};

/// `TwEp` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct LayerParam {
    pub counts: u64,
    pub meta: u64,
    pub tokens: u64,
    pub back: u64,
    pub stride: u64,
    pub first: u64,
    pub steps: u64,
    pub meta_stride: u64,
    pub row_stride: u64,
    pub back_stride: u64,
    pub size: u32,
    pub me: u32,
    pub max_tokens: u32,
    pub top_k: u32,
    pub experts: u32,
    pub capacity: u32,
    pub align: u32,
    pub scales: u32,
}

/// `TwMeet` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MeetParam {
    pub flags: u64,
    pub stride: u64,
    pub epoch: u64,
    pub ticket: u64,
    pub slot: u32,
    pub chunk: u32,
    pub slices: u32,
    pub chunks: u32,
    pub senders: u32,
    pub leave: u32,
}

/// `TwSend` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct SendParam {
    pub x: u64,
    pub weights: u64,
    pub scales: u64,
    pub row_bytes: u64,
    pub tokens: u32,
    pub pad: u32,
}

/// `TwRecv` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RecvParam {
    pub x: u64,
    pub weights: u64,
    pub scales: u64,
    pub index: u64,
    pub row_bytes: u64,
    pub buffer: u32,
    pub bad_input: u32,
    pub rank_major: u32,
    pub pad: u32,
}

/// `TwBack` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct BackParam {
    pub y: u64,
    pub weights: u64,
    pub dw: u64,
    pub out: u64,
    pub dw_out: u64,
    pub hidden: u32,
    pub expert_major: u32,
    pub tokens: u32,
    pub pad: u32,
}

/// `TwHandle` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HandleParam {
    pub rows: u64,
    pub ranks: u64,
    pub num: u64,
    pub copies: u64,
    pub source: u64,
    pub place: u64,
    pub counts: u64,
    pub m_splits: u64,
    pub total: u64,
    pub dropped: u64,
    pub lost: u64,
}

/// `TwRouting` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RoutingParam {
    pub idx: u64,
    pub blocks: u64,
    pub choices: u32,
    pub wide: u32,
    pub span: u32,
    pub bad_input: u32,
    pub part: u32,
    pub pad: u32,
}
