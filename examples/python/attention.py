"""Attention over a sequence that no rank has whole, beside the dense one.

    torchrun --nproc-per-node 2 examples/python/attention.py

Each rank has two chunks of every document, an early and a late one, so that causal work is even.
"""

import torch
import torch.distributed as dist

import tilewire.torch as tw

HEADS, HEADS_KV, DIM = 8, 2, 16


def dense(q, k, v, cu):
    """One document after the other, [tokens, heads, d]."""
    outs = []
    for a, b in zip(cu[:-1], cu[1:]):
        kk, vv = (t[a:b].repeat_interleave(HEADS // HEADS_KV, 1).transpose(0, 1) for t in (k, v))
        qq = q[a:b].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(qq, kk, vv, is_causal=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def main():
    dist.init_process_group("gloo")
    with tw.init() as world:
        torch.manual_seed(0)  # the same global tensors on all ranks
        cu = [0]
        for chunks in (6, 2, 4):  # lengths are multiples of twice the ranks
            cu.append(cu[-1] + chunks * 2 * world.size)
        shapes = [(cu[-1], h, DIM) for h in (HEADS, HEADS_KV, HEADS_KV)]
        q, k, v = (torch.randn(s).requires_grad_() for s in shapes)
        d_out = torch.randn(cu[-1], HEADS, DIM)
        ref = dense(q, k, v, cu)
        ref.backward(d_out)

        def shard(t):
            return tw.cp_shard(t.detach(), cu_seqlens=cu).to(world.device)

        mine = [shard(t).requires_grad_() for t in (q, k, v)]
        out = tw.cp_attention(*mine, cu_seqlens_q=cu)
        out.backward(shard(d_out))
        torch.testing.assert_close(out, shard(ref), rtol=1e-4, atol=1e-4)
        for got, want in zip(mine, (q, k, v)):
            torch.testing.assert_close(got.grad, shard(want.grad), rtol=1e-4, atol=1e-4)
        if world.rank == 0:
            print(f"{cu[-1]} tokens on {world.size} ranks agree with dense attention")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
