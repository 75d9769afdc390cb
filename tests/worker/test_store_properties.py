"""The store under any course of events: strong digests, weak ones, and states that can be divided."""

from __future__ import annotations

from store_machine import COURSE, DivisibleMachine, StoreMachine, WeakDigestMachine

TestStore = StoreMachine.TestCase
TestStore.settings = COURSE
TestWeakDigests = WeakDigestMachine.TestCase
TestWeakDigests.settings = COURSE
TestDivisible = DivisibleMachine.TestCase
TestDivisible.settings = COURSE
