// SPDX-License-Identifier: Apache-2.0

// Package kerneltest has the list of what depends on the kernel's version, and for each
// feature a test that has to hold on both sides: from its first kernel on it works, and
// before that it does not, in the way that is documented. docs/kernels.md is made of the
// list.
package kerneltest

import (
	"fmt"
	"slices"
	"strings"

	"instar/internal/kernel"
)

// Feature is something that works from a version of Linux on.
type Feature struct {
	// Name is that of the subtest of TestFeatures.
	Name string
	// Title says what works, Older what happens before Since.
	Title, Older string
	Since        kernel.Version
	// Tests show more of it.
	Tests []string
}

// Floor is the oldest kernel that the project is for.
var Floor = kernel.Version{Major: 5, Minor: 10}

// Features are sorted by version.
var Features = []Feature{
	{
		Name: "steering", Since: Floor,
		Title: "UDP packets are steered (`dispatch`)",
		Older: "`dispatch.Open` returns `ErrNotSupported`, with both versions in its text",
		Tests: []string{"all of `bpf`, `dispatch` and `dispatch/quicgo`"},
	},
	{
		Name: "handover", Since: Floor,
		Title: "listeners and state are handed over (`handover`)",
		Older: "not tried",
		Tests: []string{"all of `handover`"},
	},
	{
		Name: "memlock", Since: kernel.Version{Major: 5, Minor: 11},
		Title: "a group is made whatever `RLIMIT_MEMLOCK` is: control groups account for its memory",
		Older: "`dispatch.Open` raises the limit; without `CAP_SYS_RESOURCE` it cannot, and returns `ErrPermission`, which says to raise it",
	},
	{
		Name: "cookie", Since: kernel.Version{Major: 5, Minor: 14},
		Title: "a group's folder is named after the cookie of its network namespace, which is never used twice",
		Older: "after the inode number, which another namespace can get when the first one is gone",
	},
	{
		Name: "migrate", Since: kernel.Version{Major: 5, Minor: 14},
		Title: "TCP listeners have generations (`dispatch.SteeringTCP`): connections that wait at one that closes move to the active one",
		Older: "`dispatch.Open` returns `ErrNotSupported`, which points to `handover`: that passes the listener itself on",
		Tests: []string{"`TestWaitingConnectionsMove`, `TestHalfOpenConnectionsMove` and `TestTCPUpgradesUnderLoad` of `dispatch`"},
	},
	{
		Name: "unprivileged", Since: kernel.Version{Major: 5, Minor: 19},
		Title: "a server without capabilities joins a prepared group also where `kernel.unprivileged_bpf_disabled` is set",
		Older: "`dispatch.Open` returns `ErrPermission`; with the setting at 0 it works",
		Tests: []string{"`TestUnprivilegedServer` of `dispatch`"},
	},
	{
		Name: "last-word", Since: kernel.Version{Major: 6, Minor: 1},
		Title: "what a peer wrote before it closed a connection of the control socket is read, also after something was sent to it (6.2, and updates of 6.1)",
		Older: "it is thrown away (`unix_dgram_sendmsg` of a SOCK_SEQPACKET socket), so that the reason of a refusal or roll back can be missing: the error says that the other process is gone",
		Tests: []string{"`TestSendWhileReceiving` of `handover`"},
	},
	{
		Name: "incoming-cpu", Since: kernel.Version{Major: 6, Minor: 1},
		Title: "`SO_INCOMING_CPU` chooses in a reuseport group without a program (6.2, and updates of 6.1)",
		Older: "the hash does. With a program, as Instar has it, this changes nothing",
	},
}

// Series are the columns of the table. The matrix runs the tests on all of them, and on
// the newest kernel that there is.
var Series = []kernel.Version{{Major: 5, Minor: 10}, {Major: 6, Minor: 1}, {Major: 6, Minor: 12}, {Major: 6, Minor: 18}}

// Document is docs/kernels.md.
func Document() string {
	var b strings.Builder
	b.WriteString(`# Kernels

<!-- Made by scripts/test-kernels --doc from internal/kerneltest/features.go. -->

What works from which Linux on. ` + "`scripts/test-kernels`" + ` runs the tests of ` + "`bpf`, `dispatch`, `dispatch/quicgo`, `handover`" + `
and those of this table on Debian's kernels of the series in the columns and on the newest that is packaged.
Each line has a test, ` + "`TestFeatures` in `internal/kerneltest`" + `, which fails as well where something works earlier
than the table says: both sides of each border are tested, on the series next to it.

| | since Linux |`)
	for _, s := range Series {
		fmt.Fprintf(&b, " %v |", s)
	}
	b.WriteString(" newest | before |\n|---|---|")
	b.WriteString(strings.Repeat("---|", len(Series)+2))
	b.WriteString("\n")
	for _, f := range Features {
		fmt.Fprintf(&b, "| %s | %v |", f.Title, f.Since)
		for _, s := range Series {
			fmt.Fprintf(&b, " %s |", map[bool]string{true: "yes", false: "no"}[s.AtLeast(f.Since)])
		}
		fmt.Fprintf(&b, " yes | %s |\n", f.Older)
	}
	b.WriteString("\nTests of each, besides `TestFeatures/NAME`:\n\n")
	for _, f := range Features {
		fmt.Fprintf(&b, "* `%s`", f.Name)
		if len(f.Tests) > 0 {
			fmt.Fprintf(&b, ": %s", strings.Join(f.Tests, ", "))
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, `
Kernels older than %v are not tested: the mirrors of Debian have no package of one any more. That `+"`dispatch.Open`"+` returns
`+"`ErrNotSupported`"+` there is shown by `+"`TestOldKernel` in `dispatch`"+`, which tells it another version.
`, Floor)
	return b.String()
}

// border says whether there are kernels of the table on both sides of the feature's
// first one; those of the floor have none before.
func (f Feature) border() bool {
	older := slices.ContainsFunc(Series, func(v kernel.Version) bool { return !v.AtLeast(f.Since) })
	newer := slices.ContainsFunc(Series, func(v kernel.Version) bool { return v.AtLeast(f.Since) })
	return newer && (older || f.Since == Floor)
}
