import asyncio
import multiprocessing
import time

from corerl.rollout import loop


async def blocks() -> None:
    await asyncio.sleep(0)
    time.sleep(1.0)


async def blocks_in_a_task_of_its_own() -> None:
    await asyncio.gather(asyncio.sleep(0), blocks())


async def waits() -> None:
    await asyncio.sleep(1.0)


async def computes_a_little() -> None:
    await asyncio.sleep(0)
    time.sleep(0.05)


async def many() -> None:
    await asyncio.gather(*(computes_a_little() for _ in range(20)))


def told(answers: "multiprocessing.SimpleQueue[int | None]") -> None:
    loop.note_samples()
    for sample, work in enumerate((blocks(), waits(), blocks_in_a_task_of_its_own(), many())):
        loop.SAMPLE.set(sample)
        done = loop.begin(work)
        time.sleep(0.2)
        answers.put(loop.blocking(0.2))
        done.result()


def test_the_sample_that_blocks_the_loop_is_known_also_where_a_task_of_its_own_does() -> None:
    context = multiprocessing.get_context("spawn")  # of whose loop nobody else knows
    answers: multiprocessing.SimpleQueue[int | None] = context.SimpleQueue()
    process = context.Process(target=told, args=(answers,))
    process.start()
    process.join()
    assert [answers.get() for _ in range(4)] == [0, None, 2, None]
