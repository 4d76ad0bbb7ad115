"""A feed-forward block of tensor parallelism, beside the dense one.

    torchrun --nproc-per-node 2 examples/python/tp_block.py

Each rank has some rows of the input, some columns of the first weight and some of the second. The
gather of the rows hides behind the first product, the sum of the results behind the second.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tilewire.torch as tw

HIDDEN, INNER, TOKENS = 64, 256, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = tw.ColumnParallelLinear(HIDDEN, INNER, activation="gelu")
        self.down = tw.RowParallelLinear(INNER, HIDDEN)

    def forward(self, x):
        return x + self.down(self.up(x))


def dense(x, up, up_bias, down, down_bias):
    return x + F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)


def main():
    dist.init_process_group("gloo")
    with tw.init() as world:
        torch.manual_seed(0)  # the same global tensors on all ranks
        x, dy = torch.randn(2, TOKENS * world.size, HIDDEN).unbind()
        whole = [torch.randn(INNER, HIDDEN) / 8, torch.randn(INNER)]
        whole += [torch.randn(HIDDEN, INNER) / 16, torch.randn(HIDDEN)]

        block = Block()
        n = INNER // world.size
        part = slice(world.rank * n, (world.rank + 1) * n)
        block.up.load_state_dict({"weight": whole[0][part], "bias": whole[1][part]})
        block.down.load_state_dict({"weight": whole[2][:, part], "bias": whole[3]})

        rows = slice(world.rank * TOKENS, (world.rank + 1) * TOKENS)
        mine = x[rows].to(world.device).requires_grad_()
        y = block(mine)
        y.backward(dy[rows].to(y))

        leaves = [t.requires_grad_() for t in (x, *whole)]
        ref = dense(*leaves)
        ref.backward(dy)
        for what, got, want in [
            ("output", y, ref[rows]),
            ("gradient of x", mine.grad, x.grad[rows]),
            ("gradient of the first weight", block.up.weight.grad, whole[0].grad[part]),
            ("gradient of the second weight", block.down.weight.grad, whole[2].grad[:, part]),
            ("gradient of the second bias", block.down.bias.grad, whole[3].grad),
        ]:
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4, msg=what)
        if world.rank == 0:
            print(f"{world.size} ranks on {world.device} agree with the dense block")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
