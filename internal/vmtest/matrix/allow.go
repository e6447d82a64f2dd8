// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"instar/internal/testsum/summary"
)

// allowance lets a test be skipped for a reason.
type allowance struct {
	pkg    string
	test   string // with everything below it
	reason string // begins like this
	// series is where it counts. Default: everywhere.
	series []string
}

// allowances are all there are: for what a machine of one emulated processor cannot do,
// and for what a kernel cannot. One that no test makes use of is a failure.
var allowances = []allowance{
	{pkg: "dispatch", test: "TestDamagedControl", reason: tooSlow},
	{pkg: "dispatch", test: "TestFlipsAndDrainsUnderConstantFire", reason: tooSlow},
	{pkg: "dispatch", test: "TestForgetOfDamagedGroups", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledActivatingItself", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledClosingTheActiveOne", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledDraining", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledEvicting", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledForgettingAGroup", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledGivingAGroup", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledPreparingAGroup", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledRepairing", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledRollingBack", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledRollingBackToOneWithADeadline", reason: tooSlow},
	{pkg: "dispatch", test: "TestKilledUpgradingTheProgram", reason: tooSlow},
	{pkg: "dispatch", test: "TestDrainedGenerationStays", reason: tooSlow},
	{pkg: "dispatch", test: "TestLeavingSocketsLoseNothing", reason: tooSlow},
	{pkg: "dispatch", test: "TestManyGenerations", reason: tooSlow},
	{pkg: "dispatch", test: "TestManyWorkers", reason: tooSlow},
	{pkg: "dispatch", test: "TestMissingPin", reason: tooSlow},
	{pkg: "dispatch", test: "TestSeveralGroupsInOneProcess", reason: tooSlow},
	{pkg: "dispatch", test: "TestTableAgainstModel", reason: tooSlow},
	{pkg: "handover", test: "TestAnotherControlSocket", reason: tooSlow},
	{pkg: "handover", test: "TestExecutableReplaced", reason: tooSlow},
	{pkg: "dispatch", test: "TestAddressThatCannotBeBound/privileged_port", reason: "kernel 5.10 is older than 5.19", series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestUnprivilegedServer", reason: "kernel 5.10 is older than 5.19", series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestHalfOpenConnectionsMove", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestKilledWithWaitingConnections", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestLastTCPGenerationDrains", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestShutdownLeaves", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestTCPGenerations", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestTCPProgramAndFiles", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestTCPStrangers", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestTCPUpgradesUnderLoad", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch", test: "TestWaitingConnectionsMove", reason: noMigration, series: []string{"5.10"}},
	{pkg: "dispatch/quicgo", test: "TestOffloads/as_it_is", reason: "kernel 5.10 is older than 6.1", series: []string{"5.10"}},
	{pkg: "handover", test: "TestSendWhileReceiving", reason: "kernel 5.10 is older than 6.1", series: []string{"5.10"}},
}

// Beginnings of reasons that many tests give.
const (
	tooSlow     = "too slow for -short" // testutil.UnlessShort
	noMigration = "kernel 5.10 is older than 5.14"
)

func (a allowance) applies(pkg, series string) bool {
	if a.pkg != pkg {
		return false
	}
	for _, s := range a.series {
		if s == series {
			return true
		}
	}
	return len(a.series) == 0
}

// allowed finds what lets the test be skipped, -1 when nothing does.
func allowed(pkg, series string, s summary.Skip) int {
	for i, a := range allowances {
		if a.applies(pkg, series) && (s.Test == a.test || strings.HasPrefix(s.Test, a.test+"/")) && strings.HasPrefix(s.Reason, a.reason) {
			return i
		}
	}
	return -1
}
