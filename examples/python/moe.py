"""A layer of experts over the ranks, beside the same layer on one.

    torchrun --nproc-per-node 2 examples/python/moe.py

Tokens travel to the ranks of their experts, are multiplied there in one launch however many rows
each expert has, and come back weighted. The numbers of rows stay on the device.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilewire.torch as tw

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 32, 64, 8, 2, 24


class Experts(torch.nn.Module):
    def __init__(self, world):
        super().__init__()
        sizes = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
        self.ep = tw.EpGroup(world, dtype=torch.float32, **sizes)
        made = dict(bias=False, device=world.device)
        self.up = tw.GroupedLinear(self.ep.num_local_experts, HIDDEN, INNER, **made)
        self.down = tw.GroupedLinear(self.ep.num_local_experts, INNER, HIDDEN, **made)

    def forward(self, x, topk_idx, topk_weights):
        buf = self.ep.buffer()  # one for each microbatch in flight
        rows, weights, m_splits = tw.ep_dispatch(buf, x, topk_idx, topk_weights)
        rows = self.down(F.silu(self.up(rows, m_splits)), m_splits)
        return tw.ep_combine(buf, rows, weights)


def dense(x, up, down, idx, weights):
    inner = F.silu(torch.einsum("th,tkih->tki", x, up[idx]))
    return (torch.einsum("tki,tkhi->tkh", inner, down[idx]) * weights[..., None]).sum(1)


def main():
    dist.init_process_group("gloo")
    with tw.init() as world:
        torch.manual_seed(0)  # the same global tensors on all ranks
        x = torch.randn(world.size, TOKENS, HIDDEN)
        up = (torch.randn(EXPERTS, INNER, HIDDEN) / 6).requires_grad_()
        down = (torch.randn(EXPERTS, HIDDEN, INNER) / 8).requires_grad_()
        scores = torch.randn(world.size, TOKENS, EXPERTS).softmax(-1)
        weights, idx = scores.topk(TOP_K)

        layer = Experts(world)
        first = world.rank * layer.ep.num_local_experts
        with torch.no_grad():
            for e in range(layer.ep.num_local_experts):
                getattr(layer.up, f"weight{e}").copy_(up[first + e])
                getattr(layer.down, f"weight{e}").copy_(down[first + e])
        mine = [t[world.rank].to(world.device) for t in (x, idx, weights)]
        y = layer(*mine)
        y.sum().backward()

        ref = [dense(x[r], up, down, idx[r], weights[r]) for r in range(world.size)]
        sum(r.sum() for r in ref).backward()
        torch.testing.assert_close(y.cpu(), ref[world.rank], rtol=1e-4, atol=1e-4)
        for e in range(layer.ep.num_local_experts):
            got = getattr(layer.up, f"weight{e}").grad.cpu()
            torch.testing.assert_close(got, up.grad[first + e], rtol=1e-4, atol=1e-4)
        if world.rank == 0:
            print(f"{EXPERTS} experts on {world.size} ranks agree with the dense layer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
