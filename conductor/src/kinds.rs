//! [`Kinds`]: numbers of models and of kinds of engines, which the scheduler has a limited number of.

use std::collections::HashMap;

use conductor_core::cost::CostModel;
use conductor_core::scheduler::{KindId, Role, Scheduler};

/// Most kinds of engines; further ones share one.
pub(crate) const KINDS_MAX: usize = 1_024;

/// The numbers, which outlive their engines, so that what was learnt of a kind is there when its engines are
/// back. At a limit, the one whose last engine left first is given to another.
#[derive(Debug)]
pub(crate) struct Kinds {
    models: HashMap<(String, String), Used<u32>>,
    /// By model, role and class: each has costs that are fitted to what is reported.
    kinds: HashMap<(u32, Role, String), Used<KindId>>,
    models_max: usize,
    next_model: u32,
    /// Counts departures.
    departures: u64,
    /// Those whose model was given up.
    free: Vec<KindId>,
}

#[derive(Debug)]
struct Used<T> {
    number: T,
    engines: u32,
    /// The number of the departure of its last engine.
    left: u64,
}

impl<T: Copy> Used<T> {
    const fn of(number: T) -> Self {
        Self { number, engines: 1, left: 0 }
    }

    fn leave(&mut self, departure: u64) {
        self.engines = self.engines.saturating_sub(1);
        self.left = departure;
    }
}

impl Kinds {
    pub(crate) fn new(models_max: u32) -> Self {
        Self {
            models: HashMap::new(),
            kinds: HashMap::new(),
            models_max: models_max as usize,
            next_model: 0,
            departures: 0,
            free: Vec::new(),
        }
    }

    /// The number of a tenant's model, if any engine has served it. No instance has another one's number.
    pub(crate) fn model(&self, tenant: &str, model: &str) -> Option<u32> {
        self.models.get(&(tenant.to_owned(), model.to_owned())).map(|used| used.number)
    }

    /// An engine comes. Returns the numbers of its model and of its kind, which has the costs that a new one
    /// begins with.
    pub(crate) fn join(
        &mut self,
        scheduler: &mut Scheduler,
        (tenant, model): (&str, &str),
        role: Role,
        class: &str,
    ) -> (u32, KindId) {
        let name = (tenant.to_owned(), model.to_owned());
        let model = match self.models.get_mut(&name) {
            Some(used) => {
                used.engines += 1;
                used.number
            }
            None => {
                let number = self.model_number(scheduler);
                self.models.insert(name, Used::of(number));
                number
            }
        };
        let name = (model, role, class.to_owned());
        if let Some(used) = self.kinds.get_mut(&name) {
            used.engines += 1;
            return (model, used.number);
        }
        if self.kinds.len() >= KINDS_MAX
            && let Some(idle) = longest_idle(&self.kinds)
            && let Some(used) = self.kinds.remove(&idle)
        {
            self.free.push(used.number);
        }
        let kind = match self.free.pop() {
            Some(kind) => {
                scheduler.renew_kind(kind, CostModel::LLAMA3_70B_A800);
                kind
            }
            // All of them are in use.
            None if self.kinds.len() >= KINDS_MAX => {
                let Some(any) = self.kinds.values().next() else { unreachable!("KINDS_MAX is not 0") };
                return (model, any.number);
            }
            None => scheduler.add_kind(CostModel::LLAMA3_70B_A800),
        };
        self.kinds.insert(name, Used::of(kind));
        (model, kind)
    }

    /// An engine that [joined](Self::join) is gone.
    pub(crate) fn leave(&mut self, (tenant, model): (&str, &str), role: Role, class: &str) {
        self.departures += 1;
        let Some(used) = self.models.get_mut(&(tenant.to_owned(), model.to_owned())) else { return };
        used.leave(self.departures);
        if let Some(used) = self.kinds.get_mut(&(used.number, role, class.to_owned())) {
            used.leave(self.departures);
        }
    }

    /// Models and kinds that are known.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.models.len(), self.kinds.len() + self.free.len())
    }

    /// A number for a model.
    fn model_number(&mut self, scheduler: &mut Scheduler) -> u32 {
        if self.models.len() >= self.models_max
            && let Some(idle) = longest_idle(&self.models)
            && let Some(used) = self.models.remove(&idle)
        {
            let Self { kinds, free, .. } = self;
            kinds.retain(|(model, ..), kind| {
                let stays = *model != used.number;
                if !stays {
                    free.push(kind.number);
                }
                stays
            });
            scheduler.forget_model(used.number);
            return used.number;
        }
        self.next_model += 1;
        self.next_model - 1
    }
}

/// The one without engines whose last engine left first.
fn longest_idle<K: Clone, T>(all: &HashMap<K, Used<T>>) -> Option<K> {
    let idle = all.iter().filter(|(_, used)| used.engines == 0);
    idle.min_by_key(|(_, used)| used.left).map(|(name, _)| name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use conductor_core::scheduler::SchedulerConfig;

    fn scheduler() -> Scheduler {
        Scheduler::new(SchedulerConfig::default())
    }

    #[test]
    fn engines_of_one_role_and_class_are_of_one_kind_and_kinds_have_a_limit() {
        let (mut scheduler, mut kinds) = (scheduler(), Kinds::new(8));
        let mut kind = |model, role, class: &str| kinds.join(&mut scheduler, ("t", model), role, class).1;
        let first = kind("a", Role::Prefill, "");
        assert_eq!(kind("a", Role::Prefill, ""), first);
        assert_ne!(kind("a", Role::Decode, ""), first);
        assert_ne!(kind("b", Role::Prefill, ""), first);
        assert_ne!(kind("a", Role::Prefill, "fast"), first);
        for class in 0..2 * KINDS_MAX {
            kind("a", Role::Prefill, &class.to_string());
        }
        assert_eq!(kinds.kinds.len(), KINDS_MAX);
    }

    #[test]
    fn what_has_been_without_engines_for_the_longest_time_makes_room_and_the_rest_is_kept() {
        let (mut scheduler, mut kinds) = (scheduler(), Kinds::new(3));
        let both = Role::Both;
        let numbers = ["a", "b", "c"].map(|name| kinds.join(&mut scheduler, ("t", name), both, ""));
        kinds.leave(("t", "b"), both, "");
        kinds.leave(("t", "a"), both, "");
        // Back again, with what was learnt.
        assert_eq!(kinds.join(&mut scheduler, ("t", "a"), both, ""), numbers[0]);
        assert_eq!(kinds.join(&mut scheduler, ("t", "d"), both, ""), numbers[1], "that of b");
        assert_eq!((kinds.model("t", "b"), kinds.model("t", "d")), (None, Some(numbers[1].0)));
        // None is idle: there is one more than the limit.
        assert_eq!(kinds.join(&mut scheduler, ("t", "e"), both, "").0, 3);
        for round in 0..10_000 {
            let (name, class) = (format!("m{}", round % 7), format!("c{}", round % 5_000));
            kinds.join(&mut scheduler, ("t", &name), both, &class);
            kinds.leave(("t", &name), both, &class);
        }
        assert!(kinds.sizes().0 <= 5 && kinds.sizes().1 <= KINDS_MAX, "{:?}", kinds.sizes());
        assert_eq!(kinds.model("t", "a"), Some(numbers[0].0), "in use");
    }
}
