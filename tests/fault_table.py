"""Texts of all faults: cause, what the user sees, and what no test covers."""

from __future__ import annotations

from dataclasses import dataclass

HEADINGS = {
    1: "Launch and stop",
    30: "Checkpoints",
    33: "Inputs of the planner",
    38: "Traces and memory snapshots",
    42: "Widgets",
    49: "Attacks and extreme conditions",
    62: "Keyboard, moved cells and hidden views",
    65: "On Slurm and Ray",
}
"""Heading of each part of the table, by its first number."""


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    what: str
    seen: str
    untested: str = ""
    """What no test covers, and why; empty if the tests cover all of it."""


FAULTS = {
    1: Fault(
        "Stop while the run starts",
        "Stopped within 5 s, whichever processes were running by then.",
    ),
    2: Fault(
        "Stop in the middle of a step",
        "Stopped, with no process left, within 5 s.",
    ),
    3: Fault(
        "Stop twice, or after the end",
        "Nothing more happens; the status stays as it was.",
    ),
    4: Fault(
        "A rank ignores SIGTERM",
        "It is killed 1.5 s later. The run is stopped, or failed with the exception of the rank that failed.",
    ),
    5: Fault(
        "A rank is stopped by SIGSTOP, or hangs, while the others wait for it in a collective",
        "Stop ends all of them within 3.5 s. Before that, the run reports that no step was logged for 20 "
        "times the median step time (at least 60 s), with each rank's Python stack in its log, and "
        "continues. For a task that logs no steps it does so after ten minutes without output, CPU time or "
        "a changed stack.",
        "A task that logs no steps and uses CPU time while it waits, as CUDA's driver does for a GPU that "
        "does not answer, is never reported. One that waits for a good reason, such as input, is reported, "
        "and continues.",
    ),
    6: Fault(
        "The cell is interrupted while it waits for the run",
        "The wait ends; the run continues.",
    ),
    7: Fault(
        "The kernel restarts, or another notebook attaches",
        "A run with `outlive_kernel=True` (a checkbox in the Studio) continues; `ss.Run.attach(folder)` "
        "returns a full handle, Stop included, and `RunView` of it shows the same view. Without that option "
        "the run stops, and its reason is that its kernel ended.",
    ),
    8: Fault(
        "The kernel is killed (`kill -9`)",
        "All ranks are gone within 5 s; the run's reason says why.",
    ),
    9: Fault(
        "The supervisor or the launcher is killed",
        "All ranks are gone within 5 s; the run is lost, or failed, and its reason names the killed "
        "process. The launching process ends what ranks had started and deletes temporary files.",
        "If supervisor and kernel are killed together, or a rank started a process in its own session, no "
        "process is left to end what ranks had started, or to mask a token in the last second of a log. The "
        "ranks themselves end in any case.",
    ),
    10: Fault(
        "A rank is killed (`kill -9`, the kernel's out-of-memory killer)",
        "Failed: that rank was killed by SIGKILL, with the likely sender by the kernel's counters: its "
        "out-of-memory killer (how often, in this memory cgroup or on this machine), or another process if "
        "the counter did not change; and the rank's last resident memory and the free memory.",
        "The test in which the kernel's killer ends a rank in its own memory cgroup runs only where such a "
        "cgroup can be created; the counters of cgroup version 1 are files that a test writes.",
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
        "Its type, and the beginning and the end of its text.",
    ),
    14: Fault(
        "Another process takes the port meanwhile",
        "No effect: no port is bound. The ranks' store is in memory that they inherit; `MASTER_PORT` is "
        "only a number that frameworks may read, and `init_process_group` with `env://` uses the same "
        "store.",
        "A user's own code that serves a store at `MASTER_PORT` may find the port taken.",
    ),
    15: Fault(
        "Two runs at once",
        "Each has its own folder and `MASTER_PORT`; both finish.",
    ),
    16: Fault(
        "The cell is run again while its run is active",
        "The name of an active run raises `ValueError` with the way to stop it. The Studio's button is "
        "disabled while its run is active. Without a name a second run starts beside the first.",
    ),
    17: Fault(
        "The kernel has used CUDA already",
        "No effect: ranks are not forked from the kernel, so CUDA is not initialized in them.",
        "Without a GPU, the test only makes torch report in the launching process that CUDA is initialized. "
        "The test with a real CUDA context in the kernel needs a GPU (`tests/gpu`), and no run of it is "
        "known yet.",
    ),
    18: Fault(
        "0, -1 or too many processes",
        "`ValueError` with the number, what is allowed here, and the nearest allowed one.",
    ),
    19: Fault(
        "A function that cannot be pickled",
        "`ValueError` with the name of the object that cannot be pickled.",
    ),
    20: Fault(
        "`CUDA_VISIBLE_DEVICES` is empty or wrong",
        "The machine has the GPUs that CUDA would see, and only CPU ranks if there is none; a plan for more "
        "raises `ValueError` with what is available.",
        "The driver is a fake NVML, and its visible GPUs are compared with torch's own parsing of the "
        "variable. The comparison with CUDA itself needs a GPU (`tests/gpu`), and no run of it is known "
        "yet.",
    ),
    21: Fault(
        "torch or accelerate is missing",
        "Planning works; a launch raises `ImportError` with the command that installs it.",
    ),
    22: Fault(
        "A rank prints 100 MB, no newline, broken UTF-8, colours",
        "The end of the log: at most 64 KiB as plain text, 16 KiB in color in a view, whose search reads "
        "the whole log. No full pipe slows the run down.",
    ),
    23: Fault(
        "The disk is full, the run folder read-only",
        "A launch raises `OSError` with the cause. During a run, metrics and output that cannot be written "
        "are lost, and the log says so once there is space; the run continues and ends as usual. A rank that "
        "hangs meanwhile is reported, after ten times the usual time. A stop is obeyed. A checkpoint that "
        "does not fit is left out, and the run's status says so. Trained weights that cannot be exported are "
        "kept for an hour, and exported as soon as there is space; without an export the same holds for the "
        "last checkpoint, and for ten minutes for that of a stop.",
        "If not even the final status can be written, a run counts as lost; the exception of a run that "
        "failed on a full disk may be lost as well, and then the reason says so.",
    ),
    24: Fault(
        "The run folder is deleted or moved during the run",
        "Lost: its folder is gone. No process is left. A folder that was moved says, opened at its new path, "
        "that the run was stopped for it.",
    ),
    25: Fault(
        "The clock is set back or forth",
        "No effect: processes are identified by their start in ticks since boot; waits and the order of "
        "failures use the monotonic clock.",
        "The tests change Python's `time.time` in all processes of a run, or in the watching process: "
        "setting the machine's clock would affect everything else on it.",
    ),
    26: Fault(
        "The page is reloaded or opened twice, or a view is closed, during a run",
        "The run continues. Every view shows the whole run from its start and can stop it.",
    ),
    27: Fault(
        "Launched from a thread, or from a widget's button",
        "The same as from a cell.",
    ),
    28: Fault(
        "Stop on ipykernel 6.31, 7.1, 7.3, 7.4",
        "The Stop button ends the run on all of them, from a cell that has returned.",
        "While a cell blocks (`run.wait()`), 6.31 and 7.4 process no button before it ends: interrupt the "
        "cell, or use `await run.wait_async()`. Jupyter determines this order, and no test of ours covers "
        "it.",
    ),
    29: Fault(
        "No front end, no IPython",
        "A plain script launches, waits and stops in the same way.",
    ),
    30: Fault(
        "Killed while it saves",
        "The previous checkpoint is the newest one. The incomplete one is not listed, and `resume` with its "
        "path raises `ValueError`.",
    ),
    31: Fault(
        "Resumed on another number of ranks",
        "DDP, FSDP2 and Megatron resume, resharded; the rest raises `ValueError` before a rank starts.",
    ),
    32: Fault(
        "A truncated safetensors file, a wrong header, an index to a missing shard or to `../`",
        "A fine-tune of it raises `ValueError` before any rank starts, with the file, what is wrong in it "
        "and the nearest fix. So do links out of the folder (weights, config, tokenizer), keys that name "
        "files outside of it, pickles, an unknown dtype, and tensors that the plan's model lacks, has in "
        "addition or has in another shape. Nothing is unpickled.",
    ),
    33: Fault(
        "NaN, infinity, negative, zero, bool, text, 1e30 in any field",
        "`ValueError` with field, value, what is allowed and the nearest fix. In the Studio the message "
        "is shown at the input, and the last plan stays.",
    ),
    34: Fault(
        "Degrees that do not multiply to the number of GPUs, or do not divide heads, layers, experts",
        "`ValueError` when the plan is created, with the nearest degrees that work.",
    ),
    35: Fault(
        "Unknown, misspelt, repeated keys; a byte-order mark; a YAML bomb",
        "`ValueError` with line, key and the nearest known key, at once; the mark is skipped.",
    ),
    36: Fault(
        "A `config.json` with missing fields, absurd sizes, an unknown `model_type`",
        "Missing fields get the family's defaults in transformers; the rest raises `ValueError` with the "
        "field.",
    ),
    37: Fault(
        "A prediction that contradicts itself",
        "No component is negative; components sum to the total; more layers, longer sequences and larger "
        "batches never need less.",
    ),
    38: Fault(
        "Odd traces: empty, truncated, a gzip bomb, over 2 GB, no events, events without duration or "
        "category, negative, huge, unsorted, NaN, ranks twice or missing, `<script>` in a name",
        "Valid events are drawn, also those of a truncated or damaged file, and notes count the others. A "
        "file that is not a trace raises `ValueError` with its name and a fix; in a folder it is left out, "
        "with a note. Of several recordings of a rank the latest is shown. Ranks of different jobs raise "
        "`ValueError` with the names of their files. Names are shown as text.",
    ),
    39: Fault(
        "A malicious pickle as a memory snapshot",
        "`ValueError` with the objects that it requests; no code runs.",
    ),
    40: Fault(
        "A snapshot of pickle protocol 5",
        "Read like any other; one with buffers outside of its file raises `ValueError`.",
    ),
    41: Fault(
        "A symbolic link, a path that leaves its folder, a folder, a FIFO in a file's place",
        "`ValueError` at once: no call waits for a FIFO's writer.",
    ),
    42: Fault(
        "A thousand updates in a second",
        "At most four drawings a second; the last value is shown.",
    ),
    43: Fault(
        "A hundred views opened and closed",
        "No leak: no widget in the kernel's registry, no thread and no handler in the page is left.",
    ),
    44: Fault(
        "Wrong, unknown or oversize messages from the page",
        "Ignored; the view names them, and answers the next valid one.",
    ),
    45: Fault(
        "A callback raises",
        "The view shows the error and continues.",
    ),
    46: Fault(
        "Dark, light, high contrast, 320 px wide, keyboard only",
        "Everything stays visible and reachable, and differs by more than color. High contrast is the "
        "system's: swatches and charts keep their colors, and selected options their mark.",
    ),
    47: Fault(
        "A notebook is opened without a kernel",
        "A picture of each view's last state: sentence, chart and table, in JupyterLab, GitHub, nbviewer "
        "and nbconvert's exports. The live view replaces it when the cell is run.",
        "No test opens GitHub's and nbviewer's pages; the data that they read are in the file.",
    ),
    48: Fault(
        "No network",
        "Everything works; no request leaves the machine, which the browser asserts.",
    ),
    49: Fault(
        "HTML in a run folder from another user: in its name, its status, any text or name in its files",
        "It is shown as text. An unknown status or a value of another type makes the folder a damaged one, "
        "with a table row that says so. Everything shown from a folder is escaped: in tables, charts, logs, "
        "errors, traces and the pictures of saved notebooks. In a browser no handler runs.",
    ),
    50: Fault(
        "A task has `resume=True`, and an untrusted checkpoint, whose pickles run code, lies beside the "
        "user's runs with the name of one",
        "It is skipped. When Shardscope selects a checkpoint, here and in the Runs tab, it accepts only "
        "those with an HMAC under the user's key (`~/.local/state/shardscope/checkpoint.key`). A warning "
        "names the others (also older ones without a manifest) with the reason and the path for an explicit "
        "`resume`. With an explicit path, a pickle that loads more than tensors, plain values and the "
        "classes of its format raises an error with the file and the class.",
        "The HMAC covers pickles, position and random states, and the size of every file, not the values of "
        "tensors. No test here saves with DeepSpeed in fp16 or on NVMe.",
    ),
    51: Fault(
        "SIGCHLD is ignored in the kernel (`env --ignore-signal=CHLD`), so exit codes are lost",
        "The right status. Supervisor and launcher reset the signal, and a run is finished only if each "
        "rank itself has recorded that its task returned. Without Shardscope, `torchrun` exits with 0 "
        "although a rank failed, and `notebook_launcher` raises `TypeError` although all ranks returned.",
    ),
    52: Fault(
        "The task closes `sys.stdout` or descriptor 1, sets it to None or to an object without `flush`",
        "Finished, with all output up to then in the log; a task that fails is reported with its own "
        "exception. Under `torchrun` a rank without `flush` exits with 120, and the job fails.",
    ),
    53: Fault(
        "The kernel has no free file descriptor, or a run folder cannot be read for a while",
        "The last known status, whose reason says that it may be outdated and why. A run is lost only if "
        "its folder, its supervisor's record or its supervisor is absent (ENOENT, ENOTDIR). A supervisor "
        "does not end a run whose folder it cannot reach, and waits 10 s for a rank's record before it "
        "counts the rank as failed.",
    ),
    54: Fault(
        "The kernel has descriptor 0, 1 or 2 closed",
        "No effect: the run's processes get their own standard streams, and the lease uses none of these "
        "descriptors.",
    ),
    55: Fault(
        "A pipe, device, socket, link, loop of links, folder, sparse file of 10 GiB, invalid JSON, wrong "
        "types, huge numbers or deep nesting in place of any file of a run folder",
        "Every call returns, or raises `ValueError` with the file's name. Only regular files are opened, "
        "never through a link and without waiting, and a bounded part is read. In `ss.runs()`, the Runs tab "
        "and a comparison the folder is one row with a description of the damage, and all other runs are "
        "listed. Stop and notes write to no other file: they raise for a link in place of `control.jsonl`.",
        "A link in the place of the run folder itself is followed: users keep runs on other disks. Hard "
        "links are regular files.",
    ),
    56: Fault(
        "A thread, or a double-forked process, continues after the task has returned on every rank",
        "Finished 10 s later (`SHARDSCOPE_GRACE_SECONDS`), or 10 s after it last wrote 1 MiB a second, at "
        "most ten minutes: it may be writing a checkpoint. It is ended; the reason names it, and the log of "
        "its rank has the stacks.",
    ),
    57: Fault(
        "The task is `async def` or a generator, so calling it runs nothing",
        "`ValueError` at launch with the function's name and the fix, also through `functools.partial` and "
        "`__call__`. If only the call shows it, as for a lambda, the run fails with that reason.",
    ),
    58: Fault(
        "5,000 runs in a folder; runs of 100,000 steps on 16 ranks",
        "Listed in a second or two and 50 MiB. A list keeps no metrics: the totals of an ended run are "
        "computed once and cached in `summary.json` of its folder, which contains no status and is ignored "
        "once the other files have changed. The table shows the newest 200; `to_frame()` has all.",
        "The first `to_frame()` of runs without a summary reads all of their metrics once.",
    ),
    59: Fault(
        "Another user of the machine connects to the ports of a run, or opens the files of its processes",
        "No store is reachable: neither torch elastic's agent nor a rank serves a `TCPStore`, which has no "
        "authentication (torchrun and accelerate start one). The ranks of a run, and of a calibration, "
        "share a store in anonymous memory that only they and their user can open. Tested from a second "
        "uid; the run continues.",
        "gloo and NCCL listen on the loopback interface for the connections between ranks. They are not a "
        "store, but gloo has no authentication, and NCCL only a number: a process that connects while ranks "
        "join could take a rank's place. On systems without anonymous memory (macOS) the store is a file of "
        "mode 0600 in the run folder. The user's own code may serve another store.",
    ),
    60: Fault(
        "A task logs metrics without a pause, 60,000 lines a second",
        "All lines are in the run folder. The supervisor reads 0.5 MiB a second of them, needs less than "
        "150 MiB, and reports that TensorBoard gets a sample; Stop ends the run within 5 s. A view shows an "
        "even sample and its share of all lines; metrics.csv has every n-th line if there is more than 1 "
        "GiB.",
        "`run.metrics()` returns every line, and so takes the memory for them. The disk fills: fault 23.",
    ),
    61: Fault(
        "Ctrl-C inside `launch`, or an exception after its supervisor was started; several launches of one "
        "name at the same instant; no memory, threads, descriptors or interpreter for a launch; integers "
        "beyond float range in a run folder; `sys.exit(0)` in mid-task; a limit on the size of files "
        "(EFBIG); a second supervisor on a folder; the loopback interface is down; a task prints control "
        "sequences, names a metric as a spreadsheet's formula, or sets a token during the run and prints it "
        "in logs and in names of metrics",
        "Ctrl-C is raised once the launch is undone: no folder and no process is left, at whatever line it "
        "arrives; the same holds for any other exception. One of several launches, in any process, gets the "
        "name; the others raise `ValueError`. The error names the exhausted resource or the missing "
        "interpreter, not the folder. `ss.runs()` and comparisons skip such an integer. A run whose rank "
        "calls `sys.exit(0)` before its task returned has failed; for a `Script` it is a normal end. Output "
        "beyond the limit is lost, as on a full disk, and the run continues. A second supervisor exits with "
        "an error message and changes nothing. On a machine that cannot connect to itself the run fails at "
        "once, with the fix. `run.logs()`, errors and views contain no escape and no C1 control characters, "
        "however they are nested. A name or text that a spreadsheet would execute is quoted in metrics.csv. "
        "A token that a rank sets in `os.environ` is masked like one that was set at the launch.",
        "A token of no known form that a native library sets in the environment, or that was printed before "
        "it was set, is not masked. Output is masked a second after it is printed: until then, or if the "
        "supervisor was killed, `run.logs()` may show it.",
    ),
    62: Fault(
        "A key of JupyterLab's command mode is pressed in a menu, tab, button, chart or canvas of a view",
        "The view handles it or it has no effect: the notebook's cells and the kernel do not change. "
        "Escape, Tab and Ctrl+S still go to JupyterLab.",
    ),
    63: Fault(
        "A view's cell is moved, deleted and undone, collapsed, shown twice, reloaded or in another theme",
        "Every view's chart shows the plan that its sentence names.",
    ),
    64: Fault(
        "A view is attached late, resized, in a hidden tab, or the theme changes meanwhile",
        "It is drawn in the theme's colors and at its visible size.",
    ),
    65: Fault(
        "A node dies during a run (its slurmd and all of its processes are killed)",
        "The other nodes' ranks end within 30 s, and the job leaves the queue. Failed: which node is lost; "
        "if it is node 0, lost. With `retries=` a new attempt starts on other nodes, and until Ray has some "
        "the run is queued.",
        "Both nodes are on one machine: a node that is only cut off from the network was not tested.",
    ),
    66: Fault(
        "The controller restarts during a run",
        "The run continues; it is stopped as before.",
    ),
    67: Fault(
        "`scancel` from outside",
        "Stopped, with that reason.",
    ),
    68: Fault(
        "The time limit is reached",
        'Slurm\'s signal before it (90 s, or `extra={"signal": "USR2@300"}`) makes the ranks save a '
        "checkpoint. The job goes back into the queue, and the run continues at the same step as its next "
        "attempt. A function without `retries=` stops.",
    ),
    69: Fault(
        "A job of a partition with a higher priority preempts the run",
        "The same, within the time that Slurm leaves (KillWait or the partition's GraceTime). The losses are "
        "those of a run without interruption, and each step is in the metrics once.",
        "No test has a grace time.",
    ),
    70: Fault(
        "`scontrol requeue` from outside; no checkpoint can be saved in time",
        "The next attempt resumes from the newest checkpoint. Without any it starts at the beginning, and "
        "the run's reason says so.",
    ),
    71: Fault(
        "A rank fails, or a node is lost, in a run with `retries=`",
        "The first failure with its traceback, rank and node is in `run.attempts`; the next attempt resumes "
        "from the last checkpoint, without the lost node.",
    ),
    72: Fault(
        "The partition does not exist, or has other nodes or GPUs than the plan",
        "`ValueError` before anything is submitted, with what the partition has.",
    ),
    73: Fault(
        "The job waits for ever",
        "Queued, with Slurm's reason and estimate; Stop takes it out of the queue. The end is stored in the "
        "run folder.",
    ),
    74: Fault(
        "A node does not see the run folder",
        "A folder on a file system of one machine raises `ValueError` at launch. A node that does not see it "
        "fails, and its log in the run folder's `slurm` names it. On Ray the records are streamed (85).",
        "No test has Slurm nodes without a shared folder: both are on one machine.",
    ),
    75: Fault(
        "The disk is full, or a quota is reached, on one node",
        "Metrics of its ranks are lost, and its log says how many; the run continues and ends as usual.",
        "The limit is that of the rank's own files (RLIMIT_FSIZE).",
    ),
    76: Fault(
        "Two notebooks are attached to a run",
        "Both show it; a stop from either ends it, and all ranks save after the same step.",
    ),
    77: Fault(
        "The notebook runs in an interactive allocation, whose `SLURM_*` variables it has",
        "No effect on the job.",
    ),
    78: Fault(
        "The kernel is killed (`kill -9`), and the run has `outlive_kernel=False`",
        "Stopped: its kernel ended. The job leaves the queue, also one that waits.",
        "If the process that watches the kernel on its machine is killed too, the run continues.",
    ),
    79: Fault(
        "A node has another Python or torch than the others, or another Shardscope, Accelerate or framework",
        "Failed before any rank starts: the reason names the node, the package, both versions and the fix. "
        "Of Python and torch the minor version is compared. Other packages may differ.",
    ),
    80: Fault(
        "The clocks of two nodes, or of a node and the notebook's machine, are minutes apart",
        "No node and no run counts as lost: silence is measured by the clock of the process that waits. The "
        "first failure is the one that came first: times of other nodes are corrected by the difference that "
        "the ranks' start shows. The table of ranks names it. Times in the metrics stay those of each node; "
        "traces are aligned by their collectives.",
    ),
    81: Fault(
        "The scheduler sets `CUDA_VISIBLE_DEVICES`, and the notebook's machine or the node has another value",
        "The scheduler's value counts. If a node's startup file hides GPUs of the plan, the run fails "
        "before any rank starts, and the reason names the node.",
        "The test's GPUs are stand-ins: Slurm's value was read, no kernel ran on them.",
    ),
    82: Fault(
        "A rank on one of several nodes hangs, and the others wait for it in a collective",
        "The run's status names the rank that is behind, or that the others wait for, with its node. Each "
        "node writes the Python stacks of its own ranks into their logs. A node whose rank saves a "
        "checkpoint or compiles explains the others. The run continues.",
        "Which rank the others wait for is known by the steps, or if Python itself waits in the collective: "
        "not inside `backward()`.",
    ),
    83: Fault(
        "The disk of one node is full, and the nodes share no file system",
        "Another program's data alone end nothing: metrics of its ranks are lost. A checkpoint that does not "
        "fit is left out, as on one machine (23), and deleted on every node. If a rank fails, the run fails "
        "within 30 s on every node: the reason names the node, the room on its disk and the checkpoint that "
        "is kept.",
        "Both disks are file systems in memory of one machine. With a shared folder the disk is full for all "
        "nodes.",
    ),
    84: Fault(
        "The head of a Ray cluster is killed, or only its GCS, or the coordinator of a run",
        "All ranks end within a minute, and so does the run. If only the GCS is killed, the reason is that "
        "the head has not answered.",
        "A head that restarts, with an external Redis.",
    ),
    85: Fault(
        "The process that receives the records of a Ray run without a shared folder is killed (`kill -9`)",
        "The run continues, and its reason says that nothing is received. `ss.Run.attach` continues at the "
        "same byte of each file: no line is missing or there twice, also if the run has ended meanwhile.",
        "The nodes are mount namespaces of one machine, so no network was cut. After a day, or if the "
        "coordinator is lost as well, what was not received stays on the nodes.",
    ),
    86: Fault(
        "The Ray actor of a node is killed, that of node 0 included",
        "Failed, with the node's name and what to do next; the other node's ranks end within seconds. With "
        "`retries=` a new attempt starts from the last checkpoint.",
        "`retries=` needs a run folder that the nodes share.",
    ),
}
