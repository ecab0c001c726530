"""Torch tensors in the store: as they were, in shards of any number, in place."""

import threading

import numpy as np
import pytest

from mooncake_store import PutPolicy, errors

torch = pytest.importorskip("torch")
tensors = pytest.importorskip("mooncake_store.tensors")
Shard, TensorStore = tensors.Shard, tensors.TensorStore

MIB = 1 << 20
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def pair(world):
    """An owner with the master and a segment, and a guest without one."""
    owner_engine, guest_engine = world.engine("shm"), world.engine("shm")
    owner = world.store(owner_engine, lend=16 * MIB)
    guest = world.store(guest_engine, owner_engine.address)
    return TensorStore(owner), TensorStore(guest)


def random(*shape, dtype=torch.float32):
    """A tensor of random bits."""
    nbytes = max(1, int(np.prod(shape))) * dtype.itemsize
    bits = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 2, nbytes, dtype=np.uint8))
    count = int(np.prod(shape))
    return bits.view(dtype)[:count].reshape(shape).clone() if count else torch.empty(shape, dtype=dtype)


def same(one, other):
    """Same dtype, shape and bits."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5, 3)], ids=str)
def test_a_tensor_comes_back_as_it_was(pair, dtype, shape):
    tensor = random(*shape, dtype=dtype)
    for writer, reader in (pair, pair[::-1]):
        writer.put("t", tensor)
        assert same(reader.get("t"), tensor)
        into = torch.zeros(shape, dtype=dtype)
        reader.get_into("t", into)
        assert same(into, tensor)
        assert reader.describe("t") == (dtype, shape)
        reader.remove("t")
        assert not writer.store.exist("t")


def test_a_policy_holds_for_all_that_a_tensor_is_made_of(pair, tmp_path):
    writer, tensor = pair[1], random(4, 2)
    policy = PutPolicy(session="weights")
    writer.put("whole", tensor, policy=policy)
    assert writer.batch_put(["a", "b"], [tensor, tensor], policy=policy) == [True, True]
    writer.put_shard("cut", tensor[:2], Shard(0, 0, 2), policy=policy)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"file": tensor}, tmp_path / "t.safetensors")
    writer.put_safetensors("of-", str(tmp_path / "t.safetensors"), policy=policy)
    # Each once, and for the shard one more value that says how the tensor is cut.
    assert writer.store.end_session("weights") == 6


def test_strided_tensors(pair):
    owner, guest = pair
    tensor = random(6, 8)
    guest.put("t", tensor.t())
    assert same(owner.get("t"), tensor.t())
    whole = torch.zeros(8, 12)
    owner.get_into("t", whole[:, ::2])
    assert same(whole[:, ::2], tensor.t())
    assert not whole[:, 1::2].any()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("written", "read"), [(4, 2), (2, 4), (4, 3), (3, 5), (1, 4), (4, 1)])
def test_shards_are_read_in_another_number(pair, dim, written, read):
    owner, guest = pair
    tensor = random(9, 10, 11, dtype=torch.bfloat16)
    for rank in range(written):
        shard = Shard(dim, rank, written)
        part = tensor.narrow(dim, shard.bounds(tensor.shape[dim])[0], tensors_len(shard, tensor))
        pair[rank % 2].put_shard("w", part, shard, whole=tensor.shape)
    assert same(guest.get("w"), tensor)
    for other in (dim, 1):
        pieces = [guest.get("w", Shard(other, rank, read)) for rank in range(read)]
        assert same(torch.cat(pieces, other), tensor)
    into = torch.zeros_like(pieces[0])
    owner.get_into("w", into, Shard(1, 0, read))
    assert same(into, pieces[0])


def tensors_len(shard, tensor):
    begin, end = shard.bounds(tensor.shape[shard.dim])
    return end - begin


def test_a_whole_tensor_is_read_in_shards_too(pair):
    owner, guest = pair
    tensor = random(8, 6)
    owner.put("t", tensor)
    assert same(guest.get("t", Shard(1, 1, 2)), tensor[:, 3:])
    assert same(guest.get("t", Shard(0, 3, 4)), tensor[6:])


def test_bytes_go_straight_into_a_tensor_of_a_region(pair, world):
    owner, guest = pair
    tensor = random(256, 512)
    engine = guest.store.engine
    region = world.region(engine, bytes(2 * MIB))
    inside = torch.frombuffer(region.view(), dtype=torch.float32)[1024 : 1024 + tensor.numel()].view(256, 512)
    inside.copy_(tensor)
    before = engine.stats()["shm"]["bytes_written"]
    guest.put("t", inside, region=region)
    assert engine.stats()["shm"]["bytes_written"] - before == tensor.nbytes + 256
    assert same(owner.get("t"), tensor)
    inside.zero_()
    guest.get_into("t", inside, region=region)
    assert same(inside, tensor)
    with pytest.raises(errors.ValueInvalid, match="do not lie in region"):
        guest.put("u", tensor, region=region)
    with pytest.raises(errors.ValueInvalid, match="not contiguous"):
        guest.put("u", inside.t(), region=region)
    keys = ["a", "b"]
    assert guest.batch_put(keys, [inside[:10], inside[200:]], region=region) == [True, True]
    assert same(owner.get("b"), tensor[200:])


def test_batches_with_misses_and_keys_that_exist(pair):
    owner, guest = pair
    many = [random(i, 3) for i in range(5)]
    keys = [f"k{i}" for i in range(5)]
    owner.put("k2", many[4])
    assert guest.batch_put(keys, many) == [True, True, False, True, True]
    found = guest.batch_get([*keys, "nothing"])
    assert found[5] is None
    for i, tensor in enumerate(found[:5]):
        assert same(tensor, many[4] if i == 2 else many[i])
    with pytest.raises(errors.ValueInvalid, match="5 keys and 4 tensors"):
        guest.batch_put(keys, many[:4])
    assert guest.batch_get([]) == []


def test_a_missing_shard_is_a_miss_and_says_so(pair):
    owner, guest = pair
    tensor = random(8, 4)
    for rank in range(4):
        owner.put_shard("w", tensor[2 * rank : 2 * rank + 2], Shard(0, rank, 4))
    owner.store.remove("w#shard-2-of-4-dim-0")
    with pytest.raises(errors.KeyNotFound, match="not whole"):
        guest.get("w")
    assert same(guest.get("w", Shard(0, 0, 2)), tensor[:4])
    assert guest.batch_get(["w", "w"], Shard(0, 1, 2)) == [None, None]
    guest.remove("w")
    assert owner.store.stats().objects == 0


def test_what_does_not_fit_is_refused(pair):
    owner, guest = pair
    owner.put("t", random(4, 4))
    for wrong in (torch.zeros(4, 5), torch.zeros(4, 4, dtype=torch.int32)):
        with pytest.raises(errors.TensorMismatch, match=r"float32 of shape \(4, 4\)"):
            guest.get_into("t", wrong)
        assert not wrong.any()
    owner.store.put("short", b"123")
    owner.store.put("long", b"x" * 1000)
    for key in ("short", "long"):
        with pytest.raises(errors.TensorMismatch, match=key):
            guest.get(key)
    with pytest.raises(errors.KeyExists):
        guest.put("t", random(1))
    guest.put("t", random(2), if_exists="replace")
    assert same(owner.get("t"), random(2))
    with pytest.raises(errors.ConfigError, match="dimension 1"):
        guest.get("t", Shard(1, 0, 2))
    with pytest.raises(errors.ConfigError, match="0 <= rank < size"):
        Shard(0, 2, 2)
    with pytest.raises(errors.TensorMismatch, match=r"has the shape \(1, 2\)"):
        guest.put_shard("s", random(2, 2), Shard(0, 0, 3), whole=(5, 2))
    guest.put_shard("s", random(2, 2), Shard(0, 0, 2))
    with pytest.raises(errors.TensorMismatch, match="in 2 shards along dimension 0"):
        guest.put_shard("s", random(2, 2), Shard(1, 1, 2))
    assert not owner.store.exist("s#shard-1-of-2-dim-1")
    with pytest.raises(errors.ValueInvalid, match="too many dimensions"):
        guest.put("d", torch.zeros([1] * 300))


def test_a_tensor_that_others_replace_is_never_a_mix(pair):
    """Two tensors of the same number of bytes and different shapes and dtypes, in turns under one key."""
    owner, guest = pair
    first, second = torch.full((64, 32), 1.0), torch.full((32, 64), 2, dtype=torch.int32)
    owner.put("t", first)
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            owner.put("t", second, if_exists="replace")
            owner.put("t", first, if_exists="replace")

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        read = set()
        for _ in range(200):
            try:
                tensor = guest.get("t")
            except errors.TensorMismatch:  # replaced each time
                continue
            assert same(tensor, first) or same(tensor, second)
            read.add(tensor.dtype)
        assert read
    finally:
        stop.set()
        thread.join()


def test_safetensors_files_go_in_and_out(pair, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    owner, guest = pair
    weights = {"layer.0.w": random(16, 16, dtype=torch.bfloat16), "layer.0.b": random(16), "one": random()}
    safetensors.save_file(weights, tmp_path / "in.safetensors")
    keys = guest.put_safetensors("model/", str(tmp_path / "in.safetensors"))
    assert sorted(keys) == sorted("model/" + name for name in weights)
    owner.save_safetensors({name: "model/" + name for name in weights}, str(tmp_path / "out.safetensors"))
    back = safetensors.load_file(tmp_path / "out.safetensors")
    assert back.keys() == weights.keys()
    assert all(same(back[name], tensor) for name, tensor in weights.items())
    with pytest.raises(errors.KeyNotFound):
        owner.save_safetensors({"x": "nothing"}, str(tmp_path / "no.safetensors"))
    assert not (tmp_path / "no.safetensors").exists()


def test_a_shard_of_another_tensor_that_is_kept_is_not_removed_when_the_cut_differs(pair):
    writer, reader = pair
    whole = random(8, 4)
    for rank in range(4):
        writer.put_shard("w", whole[2 * rank : 2 * rank + 2], Shard(0, rank, 4))
    with pytest.raises(errors.TensorMismatch, match="float32"):
        writer.put_shard("w", random(2, 4, dtype=torch.float16), Shard(0, 1, 4), if_exists="keep")
    assert same(reader.get("w"), whole)
    with pytest.raises(errors.TensorMismatch):  # its own shard, which nobody had before, goes again
        writer.put_shard("w", random(4, 4), Shard(0, 1, 2), if_exists="keep")
    assert not writer.store.exist(b"w#shard-1-of-2-dim-0")
    assert same(reader.get("w"), whole)
