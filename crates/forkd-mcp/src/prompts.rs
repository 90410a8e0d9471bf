//! Prompts: ways of work that fork and branch make possible.

use rmcp::model::{GetPromptResult, JsonObject, Prompt, PromptArgument, PromptMessage, Role};

/// The longest argument of a prompt in bytes.
const MAX_ARGUMENT: usize = 32 << 10;

/// All prompts.
pub(crate) fn list() -> Vec<Prompt> {
    let argument = |name: &str, required, description: &str| {
        PromptArgument::new(name).with_description(description).with_required(required)
    };
    let sandbox = || argument("sandbox_id", false, "Id of a running sandbox; without it, one is spawned.");
    vec![
        Prompt::new(
            TRY,
            Some("Fork a sandbox three times, try another way in each child, compare, and keep the best."),
            Some(vec![argument("task", true, "What to achieve, and how to judge a result."), sandbox()]),
        )
        .with_title("Try three ways"),
        Prompt::new(
            CHECKPOINT,
            Some("Branch a sandbox, make a change, check it, and roll back if the check fails."),
            Some(vec![
                argument("change", true, "The change to make."),
                argument("check", true, "The command that succeeds if the change is good."),
                sandbox(),
            ]),
        )
        .with_title("Change with an undo"),
    ]
}

const TRY: &str = "try_three_ways";
const CHECKPOINT: &str = "change_with_undo";

/// The text of a prompt; an error says which argument is missing.
pub(crate) fn get(name: &str, arguments: &JsonObject) -> Result<GetPromptResult, String> {
    let given = |argument: &str| match arguments.get(argument).map(|value| value.as_str()) {
        None => Ok(None),
        Some(Some(text)) if text.len() <= MAX_ARGUMENT => {
            Ok(Some(text.trim()).filter(|text| !text.is_empty()))
        }
        Some(Some(_)) => Err(format!("the argument `{argument}` is longer than {MAX_ARGUMENT} bytes")),
        Some(None) => Err(format!("the argument `{argument}` must be a text")),
    };
    let needed = |argument: &str| {
        given(argument)?.ok_or_else(|| format!("the prompt {name} needs the argument `{argument}`"))
    };
    let start = match given("sandbox_id")? {
        Some(id) => format!("Use the sandbox {id}. get_sandbox shows whether it runs."),
        None => "Choose a snapshot with list_snapshots, and make one sandbox with spawn_sandboxes.".into(),
    };
    let text = match name {
        TRY => try_three_ways(needed("task")?, &start),
        CHECKPOINT => change_with_undo(needed("change")?, needed("check")?, &start),
        _ => return Err(format!("there is no prompt {name}; prompts/list has all")),
    };
    Ok(GetPromptResult::new(vec![PromptMessage::new_text(Role::User, text)]))
}

fn try_three_ways(task: &str, start: &str) -> String {
    format!(
        "Solve this task in three different ways, and keep the best result:\n\n{task}\n\n\
         1. {start} Prepare in it what all ways need.\n\
         2. Name three ways that really differ, and how to compare their results with a command or a number.\n\
         3. Call fork_sandbox once with n=3. The children have the same memory, processes and files.\n\
         4. Follow one way in each child. A failure in one child does not touch the others.\n\
         5. Compare the children in the way of step 2, and show the numbers.\n\
         6. Call keep for the best child, and kill_sandbox for the other two.\n\
         7. Report the id of the child that you keep, why it won, and what the other ways lacked."
    )
}

fn change_with_undo(change: &str, check: &str, start: &str) -> String {
    format!(
        "Make this change in a sandbox, so that nothing is lost if it fails:\n\n{change}\n\n\
         The change is good if this succeeds:\n\n{check}\n\n\
         1. {start} Run the check before the change, to know the state.\n\
         2. Call branch_sandbox. Remember the tag: it is the undo.\n\
         3. Make the change.\n\
         4. Run the check. If it fails, read the reason, call rollback_sandbox to the tag, and try another way. \
         Try at most three times.\n\
         5. Report what works now, or why no try was good. In that case the sandbox is back at the branch."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn arguments(value: serde_json::Value) -> JsonObject {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn every_prompt_takes_the_arguments_that_it_lists() {
        for prompt in list() {
            let all = prompt.arguments.unwrap();
            let mut given = JsonObject::new();
            for argument in all.iter().filter(|argument| argument.required == Some(true)) {
                let error = get(&prompt.name, &given).unwrap_err();
                assert!(error.contains(&argument.name), "{error}");
                given.insert(argument.name.clone(), json!("MARK"));
            }
            let text = serde_json::to_string(&get(&prompt.name, &given).unwrap()).unwrap();
            assert!(text.contains("MARK") && text.contains("spawn_sandboxes"), "{text}");
            given.insert("sandbox_id".into(), json!("sb77"));
            let text = serde_json::to_string(&get(&prompt.name, &given).unwrap()).unwrap();
            assert!(text.contains("sb77") && !text.contains("spawn_sandboxes"), "{text}");
        }
    }

    #[test]
    fn strange_arguments_are_refused() {
        for bad in
            [json!({}), json!({ "task": 1 }), json!({ "task": "x".repeat(100_000) }), json!({ "task": " " })]
        {
            assert!(get(TRY, &arguments(bad)).is_err());
        }
        assert!(get("nothing", &JsonObject::new()).is_err());
    }
}
