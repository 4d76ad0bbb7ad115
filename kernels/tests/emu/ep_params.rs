//! Parameters of the kernels of expert parallelism, as they lie in their texts.

use bytemuck::{Pod, Zeroable};

use crate::memory::Memory;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Layer {
    pub areas: [u64; 4],
    pub stride: u64,
    pub first: u64,
    pub steps: u64,
    pub strides: [u64; 3],
    pub size: u32,
    pub me: u32,
    pub max_tokens: u32,
    pub top_k: u32,
    pub experts: u32,
    pub capacity: u32,
    pub align: u32,
    pub scales: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Meet {
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

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Routing {
    pub idx: u64,
    pub blocks: u64,
    pub choices: u32,
    pub wide: u32,
    pub span: u32,
    pub bad: u32,
    pub part: u32,
    pub pad: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Send {
    pub x: u64,
    pub weights: u64,
    pub scales: u64,
    pub row_bytes: u64,
    pub tokens: u32,
    pub pad: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Recv {
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

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Back {
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

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Poison {
    pub out: [u64; 8],
    pub len: [u64; 8],
    pub byte: [u8; 8],
}

pub fn poison(outs: &[(&Memory, u8)]) -> Poison {
    let mut p = Poison { out: [0; 8], len: [0; 8], byte: [0; 8] };
    for (i, (m, byte)) in outs.iter().enumerate() {
        (p.out[i], p.len[i], p.byte[i]) = (m.addr(), m.len_bytes() as u64, *byte);
    }
    p
}
