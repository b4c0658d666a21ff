"""Elastic states in one process: the common commit, the errors that a lost worker causes, and refused arguments."""

import pytest

from grace import elastic, grace_from_params


@pytest.mark.parametrize(
    "commits, expected",
    [
        ([[[4, 2, 0]], [[4, 2, 1]]], (4, 2)),
        ([[[4, 2, 0], [8, 2, 0]], [[4, 2, 1]]], (8, 2)),  # worker 0 has the weights of its last commit
        ([[[4, 2, 0]], [[4, 2, 1], [8, 2, 1]], []], (4, 2)),
        ([[[8, 4, 1], [8, 3, 0]], [[4, 4, 2], [8, 4, 2]], [[4, 4, 3], [8, 4, 3]]], (8, 4)),  # not all have met
        ([[[8, 4, 1], [8, 3, 0]], [[8, 4, 2], [8, 3, 1]], [[8, 3, 2]]], (8, 3)),
    ],
)
def test_what_counts_is_of_worker_0s_step_and_of_most(commits, expected):
    assert elastic._common(commits) == expected


def test_a_state_needs_a_grace():
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch.elastic")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(ValueError, match=r"wrap it in DistributedOptimizer first, or name the Grace"):
        elastic.TorchState(optimizer=optimizer)
    grc = grace_from_params({"compressor": "none"}, "local")
    assert elastic.TorchState(optimizer=optimizer, grace=grc).grace is grc


def test_a_torch_state_goes_back_to_its_commit_and_drops_the_pass_under_way():
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch.elastic")
    import grace

    net = torch.nn.Linear(40, 40)
    grc = grace_from_params({"compressor": "topk", "min_numel": 0}, "local")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters(), backward_passes_per_step=2)
    state = elastic.TorchState(net, optimizer, batch=0)
    before = net.weight.detach().clone()
    net(torch.ones(2, 40)).sum().backward()
    state.batch = 1
    net.weight.data.zero_()
    state.restore()
    state.reset()
    assert torch.equal(net.weight, before)
    assert state.batch == 0
    assert net.weight.grad is None
    for _ in range(2):  # two new passes: the interrupted step's pass does not count
        assert grc.report().steps == 0
        net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert grc.report().steps == 1


def test_a_keras_state_goes_back_to_its_commit():
    keras = pytest.importorskip("keras")
    pytest.importorskip("horovod.tensorflow.elastic")
    import grace

    grc = grace_from_params({"compressor": "topk", "min_numel": 0}, "local")
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), grc)
    with pytest.raises(ValueError, match="the model must be built first"):
        elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]), optimizer)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    state = elastic.KerasState(model, optimizer, epoch=0)
    assert len(grc.names) == 2  # before its first gradient
    before = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    for variable in model.variables:
        variable.assign_add(keras.ops.ones_like(variable))
    state.epoch = 5
    state.restore()
    assert state.epoch == 0
    after = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    assert all((one == two).all() for one, two in zip(before, after, strict=True))
    model.train_function = "a graph"
    state.reset()
    assert model.train_function is None


def test_a_keras_state_takes_local_training_back_to_its_commit():
    keras = pytest.importorskip("keras")
    pytest.importorskip("horovod.tensorflow.elastic")
    import numpy as np

    import grace

    local = grace.local.from_params({"local": {"preset": "localsgd", "sync_every": 2}}, "local")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    state = elastic.KerasState(model, grace=local, epoch=0)
    assert local.built
    local.settle()

    def train():
        model.train_on_batch(np.ones((8, 4), "float32"), np.zeros((8, 3), "float32"))
        local.step()

    for _ in range(3):
        train()
    state.save()
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    for _ in range(2):
        train()
    assert (local.steps, local.landed) == (5, 2)
    state.restore()
    assert all((one.numpy() == two).all() for one, two in zip(variables, before, strict=True))
    assert [commit["step"] for commit in state._commits] == [0, 3]
    local.reset("local", state._commits[-1:])
    assert (local.steps, local.landed) == (3, 1)


def test_only_errors_of_a_lost_worker_begin_again():
    tf = pytest.importorskip("tensorflow")
    exceptions = pytest.importorskip("horovod.common.exceptions")

    def fail(error):
        raise error

    for error in (
        tf.errors.UnknownError(None, None, "Horovod has been shut down"),
        tf.errors.AbortedError(None, None, "Horovod: a connection was lost"),
        # The error of a reduction in flight does not mention Horovod.
        tf.errors.UnknownError(None, None, "[/tmp/h/gloo/transport/tcp/pair.cc:598] Connection closed by peer"),
        tf.errors.UnknownError(None, None, "ncclCommInitRank failed [[{{node model/grace.bucket0.0.reduce.sum}}]]"),
    ):
        with pytest.raises(exceptions.HorovodInternalError):
            elastic._plainly(fail, error)
    for error in (
        tf.errors.InvalidArgumentError(None, None, "in /home/me/Horovod/train.py"),
        tf.errors.UnknownError(None, None, "a disk is full"),
        tf.errors.UnknownError(None, None, "in /tmp/gloo/grace.py: a disk is full [[{{node PyFunc}}]]"),
        ValueError("Horovod"),
    ):
        with pytest.raises(type(error)):
            elastic._plainly(fail, error)


def test_a_folder_of_another_job_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch.elastic")
    from grace import checkpoint

    grc = grace_from_params({"compressor": "topk", "min_numel": 0}, "local")
    grc.build({"a": torch.zeros(50)})
    for _ in range(3):
        grc.step({"a": torch.ones(50)})
    checkpoint.save(grc, tmp_path)
    state = elastic.TorchState(grace=grc, folder=tmp_path)
    state._check_folder(3)
    with pytest.raises(ValueError, match=r"has commits of steps \[3\], and this job starts at 2"):
        state._check_folder(2)


def test_what_dead_workers_left_is_read_where_it_is_whole(tmp_path):
    torch = pytest.importorskip("torch")
    from grace import checkpoint
    from grace.transports.local import LocalTransport, World

    for rank in range(4):
        grc = grace_from_params({"compressor": "topk", "min_numel": 0}, LocalTransport(World(4), rank))
        grc.build({"a": torch.zeros(50)})
        path = checkpoint.save(grc, tmp_path)
    path.write_bytes(path.read_bytes()[:-9])  # the last worker died while it wrote
    assert [state["rank"] for state in checkpoint.left_behind(tmp_path, 0, [0], 4)] == [1, 2]
    assert checkpoint.left_behind(tmp_path, 1, [0], 4) == []
