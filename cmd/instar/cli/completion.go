// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"instar/bpf"
	"instar/dispatch"
)

// complete lets shells complete the arguments of all commands that take a GROUP, and of
// those that take a generation behind it.
func (a *app) complete(root *cobra.Command) {
	for _, c := range root.Commands() {
		a.complete(c)
		words := strings.Fields(c.Use)
		switch {
		case len(words) > 2 && words[1] == "GROUP":
			c.ValidArgsFunction = a.completeGeneration
		case len(words) > 1 && strings.HasPrefix(strings.TrimPrefix(words[1], "["), "GROUP"):
			c.ValidArgsFunction = a.completeGroup
		}
		for flag, words := range map[string][]string{
			"steering": {"quic", "stateless", "flow", "wireguard", "custom", "tcp"},
			"learn":    {"received", "answered", "assured"},
			"verdict":  bpf.VerdictNames[:],
		} {
			if c.Flags().Lookup(flag) != nil {
				// Its only error is a flag that is not there.
				_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
			}
		}
	}
}

// completeGroup names the groups. What cannot be read has no names.
func (a *app) completeGroup(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	entries, err := dispatch.List(a.root)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, e := range entries {
		name := shortName(e)
		if e.Snapshot != nil {
			name = cobra.CompletionWithDesc(name, e.Snapshot.Service+", "+e.Snapshot.Steering)
		}
		names = append(names, name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeGeneration names the groups, and behind one its generations.
func (a *app) completeGeneration(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) != 1 {
		return a.completeGroup(cmd, args, word)
	}
	g, _, s, err := a.open(args[0])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	_ = g.Close() // it was only read
	var numbers []string
	for _, n := range s.Generations {
		numbers = append(numbers, cobra.CompletionWithDesc(strconv.FormatUint(uint64(n.Number), 10), n.State.String()))
	}
	slices.Sort(numbers)
	return numbers, cobra.ShellCompDirectiveNoFileComp
}
