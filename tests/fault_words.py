"""Faults 1 to 64 in words: what goes wrong, what the user sees then, and what no test shows."""

from __future__ import annotations

from dataclasses import dataclass

ROOMS = {
    1: "Launch and stop",
    30: "Checkpoints",
    33: "What the planner reads",
    38: "Traces and snapshots",
    42: "Widgets",
    49: "Found by attack",
    62: "Found in a browser",
}
"""The first number of each part of the table."""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    what: str
    seen: str
    untested: str = ""
    """What no test shows, and why; empty where the tests show all of it."""


FAULTS = {
    1: Fault(
        "Stop while the run starts",
        "It is stopped within 5 s, whatever had come up by then.",
    ),
    2: Fault("Stop in the middle of a step", "Stopped, with no process left, within 5 s."),
    3: Fault("Stop twice, or after the end", "Nothing more happens; the status stays as it was."),
    4: Fault(
        "A rank ignores SIGTERM",
        "It is killed 1.5 s later: stopped, or failed with the exception of the rank that did fail.",
    ),
    5: Fault(
        "A rank is halted (SIGSTOP), or hangs, while the others wait for it in a collective",
        "Stop ends all of them within 3.5 s. Before: no step within 20 times the median, 60 s at the least, "
        "is said while the run goes on, with each rank's Python stack in its log. Of a task that logs no "
        "steps the same is said after ten minutes without a line, CPU time or a move in the code.",
        "A task that logs no steps and computes while it waits, as CUDA's driver does for a GPU that does "
        "not answer, is never called hung. One that rightly waits, for input say, is, and goes on.",
    ),
    6: Fault("The cell is interrupted while it waits for the run", "The wait ends; the run goes on."),
    7: Fault(
        "The kernel restarts, or another notebook attaches",
        "A run with `outlive_kernel=True`, a box in the Studio, goes on; `ss.Run.attach(folder)` has it "
        "again, Stop included, and `RunView` of that is the same view. "
        "Without it the run stops and says that its kernel ended.",
    ),
    8: Fault("The kernel is killed (`kill -9`)", "All ranks are gone within 5 s; the run says why."),
    9: Fault(
        "The supervisor or the launcher is killed",
        "All ranks are gone within 5 s; the run is lost, or failed, and says which of them it was. What "
        "ranks had started, and temporary files, are ended and deleted by who launched.",
        "If supervisor and kernel are killed together, or a rank gave a process a session of its own, nobody "
        "is left to end what ranks had started, or to take a token out of the last second of a log. Ranks "
        "themselves end in any case.",
    ),
    10: Fault(
        "A rank is killed (`kill -9`, the kernel's out-of-memory killer)",
        "Failed: that rank was killed by SIGKILL, and by whom as far as the kernel counts: its out-of-memory "
        "killer struck (so often, in this memory group or on this machine), or its counter stood still, and "
        "somebody else sent it; what the rank was last seen to hold, and what was free.",
        "A rank that the kernel's killer really ends, in a memory group of its own, is a test where such "
        "groups can be made; the counters of the first version of cgroups are written by a test.",
    ),
    11: Fault(
        "A rank raises, and the others lose their connection to it",
        "The exception of the rank that failed first, with its traceback; lost connections come after it.",
    ),
    12: Fault(
        "`sys.exit(3)`, `os._exit`, a segmentation fault in a rank",
        "Failed: which rank ended how, with the end of its log.",
    ),
    13: Fault(
        "An exception without readable text, or with a megabyte of it",
        "Its type, and as much of its text as there is room for.",
    ),
    14: Fault(
        "Somebody takes the port meanwhile",
        "Nothing: no port is bound. Ranks meet in memory that they inherit; `MASTER_PORT` is only a "
        "number that frameworks may read, and `init_process_group` of `env://` meets there as well.",
        "Code of the user's own that serves a store at `MASTER_PORT` itself may find it taken.",
    ),
    15: Fault("Two runs at once", "Each has a folder and a `MASTER_PORT` of its own; both finish."),
    16: Fault(
        "The cell is run again while its run is alive",
        "A name that a living run has is refused with the way to stop it. The Studio's button is off "
        "while its run is under way. Without a name the new run is a second one beside the first.",
    ),
    17: Fault(
        "The kernel has used CUDA already",
        "Nothing: ranks are no children of the kernel, and find CUDA untouched.",
        "Without a GPU, ranks of a process whose torch says that CUDA is in use find it unused. The test of "
        "a kernel that really holds a context needs a GPU (`tests/gpu`), and no run of it is known yet.",
    ),
    18: Fault("0, -1 or too many processes", "Refused: the number, what is allowed here, the nearest."),
    19: Fault("A function that cannot be pickled", "Refused: the name of the object in it that cannot."),
    20: Fault(
        "`CUDA_VISIBLE_DEVICES` is empty or wrong",
        "This machine counts as what CUDA would see, CPU ranks if nothing; a plan for more is refused with "
        "what is here.",
        "The driver is a stand-in that answers as NVML does, and which of its GPUs are visible is held "
        "against torch's own reading of the variable. The test against CUDA's needs a GPU (`tests/gpu`), and "
        "no run of it is known yet.",
    ),
    21: Fault("torch or accelerate is missing", "Planning works; a launch names the line that installs it."),
    22: Fault(
        "A rank prints 100 MB, no newline, broken UTF-8, colours",
        "The end of the log: at most 64 KiB of it as plain text, 16 KiB in colour in a view, whose search "
        "reads all of it. The run is not slowed by a full pipe.",
    ),
    23: Fault(
        "The disk is full, the run folder read-only",
        "A launch is refused in words. Under way metrics, and what ranks print, are lost and said so in the "
        "log once there is room; the run goes on, and ends as it would have.",
        "Where not even the last status can be written any more, a run counts as lost; of one that failed on "
        "a full disk its exception may be lost too, and then that is what is said.",
    ),
    24: Fault("The run folder is deleted under way", "Lost: its folder is gone. No process stays."),
    25: Fault(
        "The clock is set back or forth",
        "Nothing: processes are told apart by ticks since boot; waits, and which rank failed first, go by "
        "the monotonic clock.",
        "What jumps is the wall clock of all the run's processes (Python's `time.time`), and in other tests "
        "that of the watching one: setting the machine's own would hit everything else on it.",
    ),
    26: Fault(
        "The page is reloaded, opened twice, a view is closed, all while the run is under way",
        "The run goes on. Every view shows all of it from the beginning and can stop it.",
    ),
    27: Fault("Launched from a thread, or from a widget's button", "The same as from a cell."),
    28: Fault(
        "Stop on ipykernel 6.31, 7.1, 7.3, 7.4",
        "The Stop button ends the run on all of them, from a cell that has returned.",
        "While a cell blocks (`run.wait()`), 6.31 and 7.4 answer no button before it ends: interrupt the "
        "cell, or use `await run.wait_async()`. That is Jupyter's own order, and no test of ours.",
    ),
    29: Fault("No front end, no IPython", "A plain script launches, waits and stops in the same way."),
    30: Fault(
        "Killed while it saves",
        "The checkpoint before is the newest one. The partial one is not listed, and refused as not whole "
        "where somebody names it.",
    ),
    31: Fault(
        "Resumed on another number of ranks",
        "DDP, FSDP2 and Megatron go on, resharded; what cannot is refused in words before a rank starts.",
    ),
    32: Fault(
        "A truncated safetensors file, a wrong header, an index to a missing shard or to `../`",
        "A fine-tune that would begin from it is refused before any rank starts, with the file, what is "
        "wrong in it and the nearest fix. So are links out of the folder, of weights, config and tokenizer, "
        "keys that name files elsewhere, pickles, a type that nobody knows, and tensors that the plan's "
        "model lacks, has more of or has in another shape. Nothing is unpickled.",
    ),
    33: Fault(
        "NaN, infinity, negative, zero, bool, text, 1e30 in any field",
        "Refused: field, value, what is allowed, the nearest. In the Studio at the input, and the last plan "
        "stays.",
    ),
    34: Fault(
        "Degrees that do not multiply to the number of GPUs, or do not divide heads, layers, experts",
        "Refused when the plan is made, with the nearest that works.",
    ),
    35: Fault(
        "Unknown, misspelt, repeated keys; a byte-order mark; a YAML bomb",
        "Refused with line, key and the nearest known one, at once; the mark is skipped.",
    ),
    36: Fault(
        "A `config.json` with missing fields, absurd sizes, an unknown `model_type`",
        "Missing ones take the family's own defaults in transformers; the rest is refused by name.",
    ),
    37: Fault(
        "A prediction that contradicts itself",
        "None is negative; components sum to the total; more layers, longer sequences, larger batches "
        "never take less.",
    ),
    38: Fault(
        "Odd traces: empty, truncated, a gzip bomb, over 2 GB, no events, events without duration or "
        "category, negative, huge, unsorted, NaN, ranks twice or missing, `<script>` in a name",
        "What is a trace is drawn, and notes count what was odd. What is none is refused with its name and "
        "a fix. Names are text.",
    ),
    39: Fault("A malicious pickle as a memory snapshot", "Refused with what it asked for; nothing runs."),
    40: Fault(
        "A snapshot of pickle protocol 5",
        "Read like any other; one that keeps bytes outside of its file is refused.",
    ),
    41: Fault(
        "A symbolic link, a path that leaves its folder, a folder, a FIFO in a file's place",
        "Refused in words, and at once: nothing waits for a FIFO's writer.",
    ),
    42: Fault("A thousand updates in a second", "At most four drawings a second; the last value is shown."),
    43: Fault(
        "A hundred views opened and closed",
        "Nothing stays: no widget in the kernel's registry, no thread, no handler in the page.",
    ),
    44: Fault(
        "Wrong, unknown or oversize messages from the page",
        "Ignored; the view says which, and the next good one is answered.",
    ),
    45: Fault("A callback raises", "The error stands in the view, which goes on."),
    46: Fault(
        "Dark, light, high contrast, 320 px wide, keyboard only",
        "Everything stays in sight, in reach and apart by more than colour. High contrast is that of the "
        "system: swatches and charts keep their colours, what is chosen its mark.",
    ),
    47: Fault(
        "A notebook is opened without a kernel",
        "A picture of each view's last state: sentence, chart and table, in JupyterLab, GitHub, nbviewer and "
        "nbconvert's exports. It is replaced by the living view when the cell is run.",
        "GitHub's and nbviewer's pages are not ours to test; what they read is in the file.",
    ),
    48: Fault("No network", "Everything works; no request leaves the machine, which the browser asserts."),
    49: Fault(
        "HTML in a run folder that somebody else made: its name, its status, any text or name in its files",
        "Text. A status that no run has, and a value of another type, make the folder a damaged one, which "
        "is a row that says so. What is shown of a folder is escaped: in tables, charts, logs, errors, "
        "traces and the pictures of saved notebooks. In a browser no handler runs.",
    ),
    50: Fault(
        "A stranger's checkpoint, whose pickles run code, lies beside the user's runs under the name of one, "
        "and a task has `resume=True`",
        "Not taken. Where Shardscope picks, here and in the Runs tab, it takes only checkpoints with an HMAC "
        "under the user's own key (`~/.local/state/shardscope/checkpoint.key`). Others, older ones without a "
        "manifest too, are named with the reason, and with the path by which they are taken all the same. "
        "Named so, a checkpoint is loaded with care: a pickle that asks for more than tensors, plain values "
        "and the classes of its format is refused, by the name of file and class.",
        "The HMAC covers pickles, position and random states, and the size of every file, not the values of "
        "tensors. No test here saves with DeepSpeed in fp16 or on NVMe.",
    ),
    51: Fault(
        "SIGCHLD is ignored in the kernel (`env --ignore-signal=CHLD`), so exit codes are lost",
        "The true end. Supervisor and launcher reset the signal, and a run is finished only where each rank "
        "itself has written that its task returned. torch shares the fault: there `torchrun` exits with 0 "
        "although a rank failed, and `notebook_launcher` raises `TypeError` although all returned.",
    ),
    52: Fault(
        "The task closes `sys.stdout` or descriptor 1, sets it to None or to an object without `flush`",
        "Finished, with all output up to then in the log; a task that fails is reported with its own "
        "exception. Under `torchrun` a rank without `flush` exits with 120, and the job fails.",
    ),
    53: Fault(
        "The kernel has no free file descriptor, or a run folder cannot be read for a while",
        "The last known status, and in its reason that there is no news and why. A run is lost only where "
        "its folder, its supervisor's record or its supervisor is absent (ENOENT, ENOTDIR). A supervisor "
        "does not end a run whose folder it cannot reach, and waits 10 s for a rank's record before it "
        "counts the rank as failed.",
    ),
    54: Fault(
        "The kernel has descriptor 0, 1 or 2 closed",
        "Nothing: the run's processes get standard streams of their own, and the lease is none of them.",
    ),
    55: Fault(
        "A pipe, device, socket, link, circle of links, folder, sparse file of 10 GiB, no JSON, wrong "
        "types, huge numbers or deep nesting in the place of any file of a run folder",
        "Every call answers, or raises `ValueError` that names the file. Only regular files are opened, "
        "never through a link and without waiting, and a bounded part is read. In `ss.runs()`, the Runs "
        "tab and a comparison the folder is one row that says what is damaged, and hides no other. Stop "
        "and notes write to no other file: a link in the place of `control.jsonl` is refused.",
        "A link in the place of the run folder itself is followed: users keep runs on other disks. Hard "
        "links are regular files.",
    ),
    56: Fault(
        "A thread, or a process that was forked twice, goes on after the task returned on every rank",
        "Finished 10 s later (`SHARDSCOPE_GRACE_SECONDS`), or 10 s after the last time that it wrote 1 MiB a "
        "second, ten minutes at most: a checkpoint may be under way. It is ended; the reason names it, and "
        "the log of its rank has the stacks.",
    ),
    57: Fault(
        "The task is `async def` or a generator, so calling it runs nothing",
        "Refused at launch, by the function's name and with the fix, through `functools.partial` and "
        "`__call__` too. Where only the call shows it, as of a lambda, the run fails and says so.",
    ),
    58: Fault(
        "5,000 runs in a folder; runs of 100,000 steps on 16 ranks",
        "Listed in a second or two and 50 MiB. A list keeps no metrics: what those of an ended run come to "
        "is computed once and kept in `summary.json` of its folder, which never has a status and is not "
        "believed when the files beside it have changed. The table shows the newest 200; `to_frame()` has "
        "all.",
        "The first `to_frame()` of runs without a summary reads all of their metrics once.",
    ),
    59: Fault(
        "Another user of the machine connects to the ports of a run, or opens the files of its processes",
        "No store answers: neither torch elastic's agent nor a rank serves a `TCPStore`, which has no "
        "authentication (torchrun and accelerate start one). The ranks of a run, and of a calibration, "
        "meet in memory without a name that only they and their user can open. Tested from a second uid; "
        "the run goes on.",
        "gloo and NCCL listen on the loopback interface for the connections between ranks. They are no "
        "store, but gloo authenticates nobody, and NCCL only by a number: who connects in the moment in "
        "which ranks join could take a rank's place. Where the system has no anonymous memory (macOS) it "
        "is a file of mode 0600 in the run folder. The user's own code may serve a store of its own.",
    ),
    60: Fault(
        "A task logs metrics without a pause, 60,000 lines a second",
        "All lines are in the run folder. The supervisor reads 0.5 MiB a second of them, needs less than "
        "150 MiB, and says that TensorBoard gets a sample; Stop ends the run within 5 s. A view shows an "
        "even sample, and which share it is; metrics.csv has every n-th line if there is more than 1 GiB.",
        "`run.metrics()` returns every line, and so takes the memory for them. The disk fills: fault 23.",
    ),
    61: Fault(
        "Ctrl-C inside `launch`, or an exception after its supervisor was started; several launches of one "
        "name at the same instant; no memory, threads, descriptors or interpreter for a launch; integers "
        "beyond float range in a run folder; "
        "`sys.exit(0)` in mid-task; a limit on the size of files (EFBIG); a second supervisor on a folder; "
        "the loopback interface is down; a task prints control sequences, names a metric as a spreadsheet's "
        "formula, or sets a token in mid-run and lets it out in logs and in names of metrics",
        "Ctrl-C is raised when the launch is undone: no folder and no process is left, whichever line it "
        "meets; the same for any other exception. One of several launches gets the name, whichever process "
        "it comes from; the others raise `ValueError`. The error names what is used up, or the interpreter, "
        "and does not blame the folder. `ss.runs()` and comparisons go on without such an integer. For "
        "`sys.exit(0)`, failed: the rank called it before its task returned; of a `Script`, it is the end. "
        "Output beyond the limit is lost, as on a full disk, and the run goes on. A second supervisor exits "
        "with an error message and changes nothing. "
        "A machine that cannot connect to itself is said so at once, with the fix. `run.logs()`, errors "
        "and views have no escape and no C1 control left, in whatever way they are nested. A name or text "
        "that a spreadsheet would run has a quote before it in metrics.csv. A token that a rank puts "
        "into `os.environ` is masked as one that was there at the launch.",
        "A token that a native library puts into the environment, or that was printed before it was put "
        "there, and has no known form. What ranks print is masked a second later: `run.logs()` may show "
        "it until then, as it does if the supervisor was killed.",
    ),
    62: Fault(
        "A key of JupyterLab's command mode is pressed in a menu, tab, button, chart or canvas of a view",
        "The view takes it or nobody does: the notebook's cells and the kernel stay as they are. Escape, Tab "
        "and Ctrl+S are still JupyterLab's.",
    ),
    63: Fault(
        "A view's cell is moved, deleted and undone, collapsed, shown twice, reloaded or in another theme",
        "Every view's chart is that of the plan in its sentence.",
    ),
    64: Fault(
        "A view is attached late, resized, in a hidden tab, or the theme changes meanwhile",
        "It is drawn in the theme's colours and at the size that it has when it is seen.",
    ),
}
