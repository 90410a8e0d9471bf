//! Evaluations, in this machine's own Python.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use forkd_protocol::connect::{Code, Error};
use serde_json::{Value, json};

use super::Python;
use crate::{
    agent::tests::{TestAgent, eventually},
    process::Cgroups,
    users::User,
};

fn eval(agent: &TestAgent, code: &str) -> Value {
    agent.call("/forkd.Agent/Eval", json!({"code": code})).unwrap()
}

fn eval_within(agent: &TestAgent, ms: &str, code: &str) -> Result<Value, Error> {
    agent.call_with("/forkd.Agent/Eval", &[("connect-timeout-ms", ms)], json!({"code": code}))
}

#[test]
fn expressions_and_statements_share_one_namespace() {
    let agent = TestAgent::new();
    let answer = eval(&agent, "x = 20\ndef f(n):\n    return n * 2 + 2\n");
    assert_eq!(answer, json!({"stdout": "", "stderr": ""}));
    let answer = eval(&agent, "f(x)");
    assert_eq!((&answer["result"], &answer["resultJson"]), (&json!("42"), &json!(42)));
    let answer = eval(&agent, "import os\nprint('side')\nx + 1");
    assert_eq!((&answer["result"], &answer["stdout"]), (&json!("21"), &json!("side\n")));
    assert_eq!(eval(&agent, "None").get("result"), None);
    assert_eq!(eval(&agent, "").get("error"), None);
    assert_eq!(eval(&agent, "__name__")["result"], "'__main__'");
}

#[test]
fn classes_defined_in_evaluated_code_are_real_ones() {
    let agent = TestAgent::new();
    eval(
        &agent,
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass Point:\n    x: int\n    y: 'int' = 2\n",
    );
    let answer = eval(&agent, "pickle.loads(pickle.dumps(Point(1)))");
    assert_eq!(answer["result"], "Point(x=1, y=2)");
    assert_eq!(answer.get("resultJson"), None);
}

#[test]
fn only_values_made_of_jsons_own_types_come_as_json() {
    let agent = TestAgent::new();
    for (code, value) in [
        ("{'a': [1, 2.5, True, None, 'ü']}", json!({"a": [1, 2.5, true, null, "ü"]})),
        ("[]", json!([])),
        ("2 ** 63", json!(9223372036854775808u64)),
        ("False", json!(false)),
    ] {
        assert_eq!(eval(&agent, code)["resultJson"], value, "{code}");
    }
    for code in [
        "(1, 2)",
        "{1: 2}",
        "{1, 2}",
        "float('nan')",
        "2 ** 64",
        "object()",
        "'\\ud800'",
        "l = []; l.append(l); l",
        "x = 0\nfor i in range(300): x = [x]\nx",
        "'x' * (2 << 20)",
        "[0] * (2 << 20)",
    ] {
        let answer = eval(&agent, code);
        assert_eq!(answer.get("resultJson"), None, "{code}");
        assert_eq!(answer.get("error"), None, "{code}: {answer}");
        assert!(answer["result"].as_str().unwrap().len() < (1 << 20) + 100, "{code}");
    }
}

#[test]
fn errors_come_with_a_traceback_of_the_code_and_nothing_else() {
    let agent = TestAgent::new();
    eval(&agent, "def f():\n    return undefined_name\n");
    let answer = eval(&agent, "print('before')\nf()");
    assert_eq!(answer["error"], "NameError: name 'undefined_name' is not defined");
    assert_eq!(answer["stdout"], "before\n");
    let traceback = answer["traceback"].as_str().unwrap();
    assert!(traceback.contains("return undefined_name"), "lines of earlier code: {traceback}");
    assert!(traceback.contains("line 2"), "{traceback}");
    assert!(!traceback.contains("forkd") && !traceback.contains("exec("), "{traceback}");

    let answer = eval(&agent, "1 +");
    assert_eq!(answer["error"], "SyntaxError: invalid syntax");
    assert!(!answer["traceback"].as_str().unwrap().contains("ast.py"), "{answer}");

    for (code, error) in [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import sys; sys.exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        (
            "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
            "E: <its text could not be made>",
        ),
        ("class R:\n    def __repr__(self): return 1 / 0\nR()", "ZeroDivisionError: division by zero"),
        ("def g(): g()\ng()", "RecursionError: maximum recursion depth exceeded"),
        ("1\0", ""),
        ("input()", "EOFError"),
    ] {
        let answer = eval(&agent, code);
        assert!(answer["error"].as_str().is_some_and(|e| e.starts_with(error)), "{code}: {answer}");
    }
    assert_eq!(eval(&agent, "f.__name__")["result"], "'f'", "the namespace survived all of them");
}

#[test]
fn output_of_child_processes_and_of_c_code_is_captured_too() {
    let agent = TestAgent::new();
    let answer = eval(
        &agent,
        "import ctypes, os, subprocess, sys\nprint('python')\nsubprocess.run(['sh', '-c', 'echo child; echo problem >&2'])\n\
         ctypes.CDLL(None).printf(b'c\\n')\nos.write(1, b'raw\\n')\nsys.stderr.write('err')\nNone",
    );
    let stdout = answer["stdout"].as_str().unwrap();
    for line in ["python", "child", "c", "raw"] {
        assert!(stdout.lines().any(|l| l == line), "{line}: {answer}");
    }
    assert_eq!(answer["stderr"], "problem\nerr");
    let answer = eval(&agent, "print('x' * 3_000_000, end='')");
    let stdout = answer["stdout"].as_str().unwrap();
    assert!(stdout.len() < (1 << 20) + 100 && stdout.ends_with("bytes more]\n"), "{}", stdout.len());
    let answer = eval(&agent, "import os; os.write(1, b'\\xff\\xfe')");
    assert_eq!(answer["stdout"], "\u{fffd}\u{fffd}");
}

#[test]
fn code_that_ends_the_interpreter_is_told_so_and_the_next_has_a_fresh_one() {
    let agent = TestAgent::new();
    for (code, why) in [
        ("print('last words'); import os; os._exit(3)", "exit status 3"),
        ("import os; print('last words'); os.kill(os.getpid(), 9)", "signal: killed"),
        ("import os; print('last words', flush=True); os.abort()", "signal: aborted"),
        (
            "print('last words')\nimport os\nfor fd in range(3, 300):\n    try: os.close(fd)\n    except OSError: pass",
            "exit status 1",
        ),
    ] {
        eval(&agent, "kept = 1");
        let answer = eval(&agent, code);
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(why) && error.contains("variables are lost"), "{code}: {error}");
        assert_eq!(answer["stdout"], "last words\n", "{code}");
        assert_eq!(eval(&agent, "'kept' in globals()")["result"], "False");
    }
}

#[test]
fn an_interpreter_that_died_between_evaluations_is_not_replaced_silently() {
    let agent = TestAgent::new();
    let pid = eval(&agent, "kept = 1\nimport os\nos.getpid()")["resultJson"].as_i64().unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    eventually("its death", || !Path::new(&format!("/proc/{pid}")).exists());
    let answer = eval(&agent, "kept");
    assert!(answer["error"].as_str().unwrap().contains("variables are lost"), "{answer}");
    assert_eq!(eval(&agent, "'kept' in globals()")["result"], "False");
}

#[test]
fn garbage_on_the_agents_pipe_costs_only_the_interpreter() {
    let agent = TestAgent::new();
    for garbage in ["b'\\xff' * 100", "b'\\0\\0\\0\\2{]' ", "b'\\0\\0\\0\\2{}\\0'", "b'\\0\\0\\0\\1['"] {
        let code = format!(
            "import os\nfor fd in range(200, 210):\n    try: os.write(fd, {garbage})\n    except OSError: pass"
        );
        let answer = eval(&agent, &code);
        assert!(
            answer["error"].as_str().is_some_and(|e| e.contains("variables are lost")),
            "{garbage}: {answer}"
        );
    }
    assert_eq!(eval(&agent, "1 + 1")["result"], "2");
}

#[test]
fn code_that_forks_is_answered_once() {
    let agent = TestAgent::new();
    let answer = eval(
        &agent,
        "import os\npid = os.fork()\nprint('parent' if pid else 'child')\nif pid: os.waitpid(pid, 0)",
    );
    assert!(answer.get("error").is_none(), "{answer}");
    assert!(answer["stdout"].as_str().unwrap().contains("parent"));
    assert_eq!(eval(&agent, "1 + 1")["result"], "2");
}

#[test]
fn an_evaluation_that_takes_too_long_is_interrupted_and_its_variables_are_kept() {
    let agent = TestAgent::new();
    eval(&agent, "kept = 7");
    let begun = Instant::now();
    let error = eval_within(&agent, "300", "while True: pass").unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert!(error.message.contains("kept"), "{}", error.message);
    assert!(begun.elapsed() < Duration::from_secs(30));
    let error =
        eval_within(&agent, "300", "import subprocess; subprocess.run(['sleep', '1000'])").unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert_eq!(eval(&agent, "kept")["result"], "7");
}

#[test]
fn an_evaluation_that_cannot_be_interrupted_is_killed() {
    let agent = TestAgent::new();
    eval(&agent, "kept = 7");
    let code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    // It has to come to its second line first.
    let error = eval_within(&agent, "2000", code).unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert!(error.message.contains("variables are lost"), "{}", error.message);
    assert_eq!(eval(&agent, "'kept' in globals()")["result"], "False");
}

#[test]
fn evaluations_wait_for_each_other() {
    let agent = TestAgent::new();
    eval(&agent, "import time\nlog = []\n");
    thread::scope(|scope| {
        for n in 0..8 {
            let agent = &agent;
            scope.spawn(move || eval(agent, &format!("log.append({n}); time.sleep(0.05); log.append({n})")));
        }
    });
    let log: Vec<u64> = serde_json::from_value(eval(&agent, "log")["resultJson"].clone()).unwrap();
    assert!(log.chunks(2).all(|pair| pair[0] == pair[1]), "{log:?}");
    assert_eq!(log.len(), 16);
}

#[test]
fn an_evaluation_waits_for_others_no_longer_than_it_may() {
    let agent = TestAgent::new();
    eval(&agent, "import os, time");
    let (runs, enough) = (agent.path("runs"), agent.path("enough"));
    // It runs until `enough` exists, which a caller that waits for its end cannot create.
    let other = format!(
        "open({runs:?}, 'w').close()\nuntil = time.monotonic() + 50\n\
         while not os.path.exists({enough:?}) and time.monotonic() < until: time.sleep(0.05)"
    );
    thread::scope(|scope| {
        scope.spawn(|| eval(&agent, &other));
        eventually("the other evaluation's beginning", || runs.exists());
        let begun = Instant::now();
        let answer = eval_within(&agent, "300", "1");
        let took = begun.elapsed();
        fs::write(&enough, "").unwrap();
        let error = answer.unwrap_err();
        assert_eq!(error.code, Code::DeadlineExceeded);
        assert!(error.message.contains("other evaluations"), "{}", error.message);
        assert!(took < Duration::from_secs(20), "{took:?}");
    });
    assert_eq!(eval(&agent, "1")["result"], "1");
}

#[test]
fn the_interpreter_runs_as_the_default_user() {
    let agent = TestAgent::with(None, Some("nobody"));
    assert_eq!(eval(&agent, "import os; os.getuid()")["result"], "65534");
}

/// Makes two forks of one state of the interpreter, and evaluates the same in both.
fn in_two_forks(prepare: &str, code: &str) -> (Value, Value) {
    let agent = TestAgent::new();
    let fork = |id: &str| {
        let answer = eval(&agent, prepare);
        assert_eq!(answer.get("error"), None, "{answer}");
        agent.become_child(id, json!({})).unwrap();
        let answer = eval(&agent, code);
        assert_eq!(answer.get("error"), None, "{answer}");
        assert_eq!(answer["stderr"], "");
        answer["result"].clone()
    };
    (fork("sb1"), fork("sb2"))
}

#[test]
fn two_forks_of_one_interpreter_draw_different_random_numbers() {
    for (prepare, code) in [
        ("import random\nrandom.seed(1)", "random.random()"),
        ("import uuid, time\nuuid._node = 1\nuuid._last_timestamp = 1 << 62", "uuid.uuid1().node"),
        (
            "import tempfile\ntempfile._name_sequence = None\ntempfile._get_candidate_names().rng.seed(1)",
            "next(tempfile._get_candidate_names())",
        ),
    ] {
        let (one, two) = in_two_forks(prepare, code);
        assert!(one.is_string() && one != two, "{code}: {one} {two}");
    }
    let unforked = "import random\nrandom.seed(1)\nrandom.random()";
    let (one, _) = in_two_forks("import random\nrandom.seed(1)", "random.random()");
    assert_ne!(eval(&TestAgent::new(), unforked)["result"], one);
}

#[test]
fn numpy_and_openssl_are_reseeded_if_they_are_loaded() {
    // The functions they have for it, in modules that stand for theirs.
    let stand_in = |module: &str, function: &str| {
        format!(
            "import sys, types\nmodule = types.ModuleType('{module}')\nseeds = []\n\
             module.{function} = lambda *seed: seeds.append(seed)\nsys.modules['{module}'] = module"
        )
    };
    let numpy = stand_in("numpy.random", "seed");
    assert_eq!(in_two_forks(&numpy, "seeds"), (json!("[()]"), json!("[()]")));
    let (one, two) = in_two_forks(&stand_in("_ssl", "RAND_add"), "seeds");
    assert!(one.as_str().is_some_and(|seeds| seeds.ends_with(", 64.0)]")) && one != two, "{one} {two}");
    let (one, _) = in_two_forks("import sys", "{'numpy', 'ssl', '_ssl', 'random'} & sys.modules.keys()");
    assert_eq!(one, "set()", "nothing is imported for it");
}

#[test]
fn a_generator_somebody_seeded_for_himself_is_left_alone() {
    let (one, two) = in_two_forks("import random\nmine = random.Random(42)", "mine.random()");
    assert_eq!(one, two);
}

#[test]
fn functions_registered_for_it_are_called_in_a_fork_and_one_that_fails_harms_nothing() {
    let agent = TestAgent::new();
    let prepare = "import forkd_guest, os\nlog = []\n\
                   forkd_guest.on_fork(lambda: log.append(os.environ['FORKD_SANDBOX_ID']))\n\
                   @forkd_guest.on_fork\ndef broken():\n    raise ValueError('no luck')\n\
                   @forkd_guest.on_fork\ndef leaves():\n    raise SystemExit(3)\n\
                   forkd_guest.on_fork(lambda: log.append('last'))";
    assert_eq!(eval(&agent, prepare).get("error"), None);
    agent.become_child("sb9", json!({})).unwrap();
    let answer = eval(&agent, "log");
    assert_eq!(answer["resultJson"], json!(["sb9", "last"]));
    let stderr = answer["stderr"].as_str().unwrap();
    assert!(stderr.contains("broken failed") && stderr.contains("ValueError: no luck"), "{stderr}");
    assert!(stderr.contains("SystemExit: 3"), "{stderr}");
    assert!(eval(&agent, "forkd_guest.on_fork(3)")["error"].as_str().unwrap().starts_with("TypeError"));
}

#[test]
fn a_running_interpreter_gets_the_variables_of_a_fork() {
    let agent = TestAgent::new();
    eval(&agent, "import os");
    let value = "ü=\n".to_string() + &"x".repeat(60_000);
    agent.become_child("sb1", json!({"envs": {"SECRET": value}})).unwrap();
    let answer = eval(&agent, "os.environ['SECRET'], os.environ['FORKD_SANDBOX_ID']");
    assert_eq!(answer["result"], format!("('ü=\\n{}', 'sb1')", "x".repeat(60_000)));
    assert_eq!(eval(&agent, "os.system('echo $FORKD_SANDBOX_ID')")["stdout"], "sb1\n");
}

#[test]
fn an_interpreter_is_told_of_a_fork_in_the_middle_of_an_evaluation() {
    let agent = TestAgent::new();
    let marker = agent.path("evaluating");
    eval(&agent, "import os, random, time");
    let code = format!(
        "random.seed(1)\nopen({marker:?}, 'w').close()\n\
         while 'FORKD_SANDBOX_ID' not in os.environ: time.sleep(0.01)\nrandom.random()"
    );
    thread::scope(|scope| {
        let evaluation = scope.spawn(|| eval_within(&agent, "30000", &code).unwrap());
        eventually("the evaluation", || marker.exists());
        agent.become_child("sb1", json!({})).unwrap();
        let answer = evaluation.join().unwrap();
        assert_eq!(answer.get("error"), None, "{answer}");
        assert_ne!(answer["result"], "0.13436424411240122", "what 1 as the seed gives");
    });
}

#[test]
fn code_that_takes_the_signal_for_itself_does_not_keep_the_news_away() {
    let (one, two) = in_two_forks(
        "import random, signal\nsignal.signal(60, signal.SIG_IGN)\nrandom.seed(1)",
        "random.random()",
    );
    assert_ne!(one, two);
    // Without any news the signal is harmless.
    let agent = TestAgent::new();
    let answer = eval_within(&agent, "20000", "import os\nos.kill(os.getpid(), 60)\n'alive'").unwrap();
    assert_eq!(answer["result"], "'alive'");
}

/// What `on_fork` functions see of a file: its size, twice.
const LOOKS: &str = "import forkd_guest, os, time\n\
                     def looks(name, answer):\n    \
                         before = os.path.getsize(name)\n    time.sleep(0.3)\n    \
                         still = os.path.getsize(name) == before\n    \
                         open(answer, 'a').write('still ' if still else 'moving ')\n";

#[test]
fn functions_run_in_a_fork_before_any_other_process_does() {
    let agent = TestAgent::new();
    if agent.cgroup.is_none() {
        return;
    }
    let [other, own, answer] = ["other", "own", "answer"].map(|name| agent.path(name));
    let tick = |file: &Path| format!("while :; do echo x >> {}; sleep 0.01; done", file.display());
    let script = tick(&other);
    let _running = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": false}));
    // One that the interpreter started, outside its session.
    let prepare = format!(
        "{LOOKS}\nimport subprocess\n\
         own = subprocess.Popen(['sh', '-c', {:?}], start_new_session=True, stderr=subprocess.DEVNULL)\n\
         forkd_guest.on_fork(lambda: [looks(name, {answer:?}) for name in ({other:?}, {own:?})])",
        tick(&own)
    );
    assert_eq!(eval(&agent, &prepare).get("error"), None);
    let size = |path: &Path| fs::metadata(path).map_or(0, |known| known.len());
    for (round, id) in ["sbone", "sbtwo"].into_iter().enumerate() {
        let before = (size(&other), size(&own));
        eventually("ticks", || size(&other) > before.0 && size(&own) > before.1);
        assert_eq!(agent.call("/forkd.Agent/Freeze", json!({})).unwrap()["frozen"], true);
        let frozen_at = (size(&other), size(&own));
        let became = agent.become_child(id, json!({})).unwrap();
        assert_eq!(became.get("warnings"), None, "{became}");
        assert_eq!(fs::read_to_string(&answer).unwrap(), "still still ".repeat(round + 1));
        eventually("both going on", || size(&other) > frozen_at.0 && size(&own) > frozen_at.1);
    }
    // Killed with the interpreter, wherever it was put meanwhile.
    let _ = eval(&agent, "os._exit(1)");
    eventually("the end of what it started", || {
        let before = size(&own);
        thread::sleep(Duration::from_millis(200));
        size(&own) == before
    });
}

#[test]
fn functions_of_an_evaluation_that_goes_on_run_first_too() {
    let agent = TestAgent::new();
    let [marker, answer] = ["marker", "answer"].map(|name| agent.path(name));
    let code = format!(
        "{LOOKS}\nforkd_guest.on_fork(lambda: open({answer:?}, 'w').write('called'))\n\
         open({marker:?}, 'w').close()\nwhile not os.path.exists({answer:?}): time.sleep(0.01)"
    );
    thread::scope(|scope| {
        let evaluation = scope.spawn(|| eval_within(&agent, "30000", &code).unwrap());
        eventually("the evaluation", || marker.exists());
        agent.become_child("sbone", json!({})).unwrap();
        assert_eq!(fs::read_to_string(&answer).unwrap(), "called");
        assert_eq!(evaluation.join().unwrap().get("error"), None);
    });
}

#[test]
fn only_an_interpreter_with_functions_or_threads_is_woken_by_a_fork() {
    let user = User::find("0").unwrap();
    for (code, woken) in [
        ("import random", false),
        ("import forkd_guest; forkd_guest.on_fork(print)", true),
        ("import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()", true),
    ] {
        let python = Python::new(Cgroups::new(None), Arc::default());
        for round in 0..2 {
            assert_eq!(python.eval(code, &user, None).unwrap().error, None, "{code}");
            let listener = python.forked(&BTreeMap::new()).unwrap();
            assert_eq!(listener.is_some(), woken, "{code} {round}");
            assert!(listener.is_none_or(|listener| listener.has_heard_within(Duration::from_secs(30))));
        }
    }
}

#[test]
fn a_function_that_takes_too_long_holds_others_up_no_longer_than_it_may() {
    let user = User::find("0").unwrap();
    let python = Python::new(Cgroups::new(None), Arc::default());
    let code = "import forkd_guest, time; forkd_guest.on_fork(lambda: time.sleep(1000))";
    assert_eq!(python.eval(code, &user, None).unwrap().error, None);
    let listener = python.forked(&BTreeMap::new()).unwrap().unwrap();
    assert!(!listener.has_heard_within(Duration::from_millis(300)));
}
