"""What is wrong is refused with the reason, before anything moves: the world goes on."""

import pytest
import torch

import tilewire
import tilewire.torch as tw


@pytest.fixture(autouse=True)
def goes_on(world, device):
    yield
    y = tw.all_gather(torch.full((1,), float(world.rank), device=device))
    torch.testing.assert_close(y.cpu(), torch.arange(world.size, dtype=torch.float32))


def test_wrong_tensors(world, device):
    x, w = torch.randn(2, 8, device=device), torch.randn(4, 8, device=device)
    for bad, text in [
        (lambda: tw.ag_gemm(x, w[:, :6]), "expected"),
        (lambda: tw.ag_gemm(x.double(), w.double()), "f64"),
        (lambda: tw.ag_gemm(x, w.to(torch.bfloat16)), "bf16"),
        (lambda: tw.ag_gemm(x.long(), w.long()), "i64"),
        (lambda: tw.ag_gemm(x, w, bias=torch.randn(5, device=device)), "bias"),
        (lambda: tw.ag_gemm(x, w, activation="sine"), "sine"),
        (lambda: tw.ag_gemm(x, w, algo="fastest"), "fastest"),
        (lambda: tw.ag_gemm(x, w, rows=[2] * (world.size + 1)), "shards"),
        (lambda: tw.ag_gemm(x[0, 0], w), "matrix|dimension"),
        (lambda: tw.all_reduce(x.int()), "i32"),
        (lambda: tw.all_reduce(x, op="max"), "max"),
        (lambda: tw.all_gather(torch.complex(x, x)), "element type|type"),
        (lambda: tw.all_to_all(x, [[1]] * (world.size + 1)), "square|rows|shape"),
    ]:
        known = (ValueError, IndexError, tilewire.Unsupported, RuntimeError)
        with pytest.raises(known, match=text):
            bad()


def test_errors_say_what_and_where(world, device):
    x, w = torch.randn(2, 8, device=device), torch.randn(4, 6, device=device)
    with pytest.raises(tilewire.InvalidArgument) as e:
        tw.ag_gemm(x, w)
    assert isinstance(e.value, ValueError) and isinstance(e.value, tilewire.Error)
    assert e.value.op == "ag_gemm" and "[2, 6]" in e.value.expected and "[2, 8]" in e.value.seen


def test_no_tensor_sparse_fake_and_meta(world, device):
    w = torch.randn(4, 8, device=device)
    with pytest.raises((TypeError, RuntimeError)):
        tw.ag_gemm([[1.0] * 8], w)
    with pytest.raises((tilewire.InvalidArgument, NotImplementedError, RuntimeError)):
        tw.all_gather(torch.eye(3, device=device).to_sparse())
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Operations that no dispatcher knows would read its memory, which is not there.
    with FakeTensorMode():
        fake = torch.empty(2, 8, device=device)
    idx = torch.zeros(2, 1, dtype=torch.int64, device=device)
    buf = tw.EpGroup(num_experts=world.size, max_tokens=2, hidden=8, top_k=1).buffer()
    for call in (
        lambda: tw.permute(fake, idx, num_experts=1),
        lambda: tw.ep_dispatch(buf, fake.to(torch.bfloat16), idx),
        lambda: tw.symm_handle(tw.symm_empty(2, 8, dtype=torch.float32, group=world)).put(fake, 0),
    ):
        with pytest.raises((tilewire.Error, RuntimeError), match="fake|Fake"):
            call()
    assert tw.ag_gemm(torch.zeros(2, 8, device="meta"), w.to("meta")).shape == (2 * world.size, 4)


@pytest.mark.needs(gpu=True)
def test_a_tensor_of_another_device(world, device):
    with pytest.raises(tilewire.InvalidArgument, match="device"):
        tw.all_gather(torch.zeros(2, device="cpu"))


def test_worlds_that_are_not_there(world):
    with pytest.raises(tw.Stale):
        tw.all_gather(torch.zeros(1), group=torch.nn.Identity())
    with pytest.raises(tilewire.InvalidArgument):
        tw.init(device="mps")
    with pytest.raises(tilewire.InvalidArgument):
        tw.init(backend="vmm", device="cpu")
    with pytest.raises((tilewire.InvalidArgument, tilewire.Error)):
        tw.init(backend="carrier-pigeon", device="cpu")


def test_a_second_world_and_any_order_of_ends(world):
    import torch.distributed as dist

    for i in range(5):
        group = dist.new_group(backend="gloo")
        with tw.init(group, device="cpu", timeout_s=30) as w:
            assert w.size == world.size
            assert tw.all_gather(torch.ones(1), group).numel() == world.size
            if i % 2:
                dist.destroy_process_group(group)
        if not i % 2:
            dist.destroy_process_group(group)
        with pytest.raises(tw.Stale):
            tw.all_gather(torch.ones(1), w)


def test_pickled_and_copied(world):
    import copy

    with pytest.raises(TypeError):
        copy.deepcopy(world)
