// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"instar/dispatch"
)

func (a *app) groupsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "groups",
		Short: "List the groups of this machine",
		Long: `List the groups that are pinned below the root: of every network namespace, those
of the caller's own marked "here".

In a cell of generations the numbers are in the order of last resort: which one
gets new flows when those in front of it are dead.`,
		Args: args(),
		RunE: func(*cobra.Command, []string) error { return a.groups() },
	}
	a.jsonFlag(cmd)
	return cmd
}

// groupJSON is a group for programs.
type groupJSON struct {
	// Group is what to type for it.
	Group string `json:"group"`
	Path  string `json:"path"`
	Netns string `json:"netns"`
	Here  bool   `json:"here"`
	Name  string `json:"name"`
	// Error says why the group could not be read; the rest is missing then.
	Error string `json:"error,omitempty"`
	*dispatch.Snapshot
}

func newGroupJSON(e dispatch.Entry) groupJSON {
	g := groupJSON{Group: shortName(e), Path: e.Path, Netns: e.Netns, Here: e.Here, Name: e.Name, Snapshot: e.Snapshot}
	if e.Err != nil {
		g.Error = oneLine(e.Err)
	}
	return g
}

// groupsJSON is a listing for programs, showJSON one group with what lives in it.
type (
	groupsJSON struct {
		Version int         `json:"version"`
		Root    string      `json:"root"`
		Groups  []groupJSON `json:"groups"`
	}
	showJSON struct {
		Version int                  `json:"version"`
		Group   groupJSON            `json:"group"`
		Flows   *dispatch.FlowCounts `json:"flows,omitempty"`
	}
)

func (a *app) groups() error {
	entries, err := dispatch.List(a.root)
	if err != nil {
		return err
	}
	if a.json {
		groups := make([]groupJSON, 0, len(entries))
		for _, e := range entries {
			groups = append(groups, newGroupJSON(e))
		}
		return a.printJSON(groupsJSON{jsonVersion, a.root, groups})
	}
	if len(entries) == 0 {
		fmt.Fprintf(a.env.Stderr, "no groups below %s\n", a.root)
		return nil
	}
	var t table
	t.add(colourFaint, "GROUP", "ADDRESS", "SERVICE", "STEERING", "ACTIVE", "STAGED", "DRAINING", "PACKETS", "NETNS")
	for _, e := range entries {
		netns := e.Netns
		if e.Here {
			netns = "here"
		}
		s := e.Snapshot
		if s == nil {
			reason := "unreadable"
			if e.Err != nil {
				reason = oneLine(e.Err)
			}
			t.add(colourYellow, shortName(e), "-", "-", "-", "-", "-", "-", "-", netns+" ("+reason+")")
			continue
		}
		t.add(colourNone, shortName(e), address(s), s.Service, s.Steering,
			numbers(s, dispatch.StateActive), numbers(s, dispatch.StateStaged), numbers(s, dispatch.StateDraining),
			strconv.FormatUint(s.Packets, 10), netns)
	}
	return t.write(a.env.Stdout, a.env.colours(a.env.Stdout))
}

// address is how people write the address of a group.
func address(s *dispatch.Snapshot) string {
	text := s.Network + " " + s.Address
	if s.Device != "" {
		text += " " + s.Device
	}
	return text
}

// numbers lists the generations in one state.
func numbers(s *dispatch.Snapshot, state dispatch.State) string {
	var list []string
	for _, g := range s.Generations {
		if g.State != state {
			continue
		}
		n := strconv.FormatUint(uint64(g.Number), 10)
		if g.Live == 0 {
			n += " (dead)"
		}
		list = append(list, n)
	}
	return dash(strings.Join(list, ","))
}

func (a *app) showCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show GROUP",
		Short: "Show the generations and verdicts of a group",
		Long: `Show a group: its generations in the order of last resort (who gets new flows if
all above are dead), and how many packets ended in each verdict of the data
plane. LIVE is the workers that hold a socket, of all that joined.

"instar help names" says how to name a group.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error { return a.show(args[0]) },
	}
	a.jsonFlag(cmd)
	return cmd
}

func (a *app) show(name string) (err error) {
	g, e, s, err := a.open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var flows *dispatch.FlowCounts
	if s.Steering == dispatch.SteeringFlow.String() {
		c, err := g.FlowCounts()
		if err != nil {
			return err
		}
		flows = &c
	}
	if a.json {
		e.Snapshot = &s
		return a.printJSON(showJSON{jsonVersion, newGroupJSON(e), flows})
	}

	w, colours := a.env.Stdout, a.env.colours(a.env.Stdout)
	var head table
	head.add(colourNone, "group", shortName(e))
	head.add(colourNone, "address", address(&s))
	head.add(colourNone, "service", s.Service)
	head.add(colourNone, "steering", fmt.Sprintf("%s (program %s, layout %d)", s.Steering, dash(s.Program), s.Layout))
	head.add(colourNone, "generations", fmt.Sprintf("%d of %d, up to %d workers each", len(s.Generations), s.MaxGenerations, s.MaxWorkers))
	if s.FlowEntries > 0 {
		head.add(colourNone, "flows", flowsLine(&s, flows))
	}
	head.add(colourNone, "path", s.Path)
	if err := head.write(w, colours); err != nil {
		return err
	}

	a.printf("")
	if len(s.Generations) == 0 {
		a.printf("no generation holds a socket")
	} else if err := a.generationTable(&s, flows).write(w, colours); err != nil {
		return err
	}

	a.printf("")
	if s.Packets == 0 {
		a.printf("no %s yet", unit(&s))
		return nil
	}
	return verdictTable(&s).write(w, colours)
}

func (a *app) generationTable(s *dispatch.Snapshot, flows *dispatch.FlowCounts) *table {
	now := a.env.Now()
	var t table
	what := strings.ToUpper(unit(s))
	columns := []string{"GENERATION", "STATE", "PID", "COMMAND", "BUILD", "LIVE", what + "S", "LAST " + what, "JOINED", "DEADLINE"}
	if flows != nil {
		columns = append(columns, "FLOWS")
	}
	t.add(colourFaint, columns...)
	for _, g := range s.Generations {
		colour := colourNone
		switch g.State {
		case dispatch.StateActive:
			colour = colourGreen
		case dispatch.StateDraining:
			colour = colourYellow
		}
		state := g.State.String()
		if g.Live == 0 {
			state, colour = "dead", colourYellow // until the group changes again
		}
		line := []string{
			strconv.FormatUint(uint64(g.Number), 10), state, strconv.Itoa(g.PID),
			dash(g.Command), dash(g.Build), fmt.Sprintf("%d/%d", g.Live, g.Workers),
			strconv.FormatUint(g.Packets, 10), ago(now, g.LastPacket), ago(now, g.Joined), until(now, g.Deadline),
		}
		if flows != nil {
			line = append(line, strconv.Itoa(flows.Live[g.Number]))
		}
		t.add(colour, line...)
	}
	return &t
}

// unit is what the data plane of a group counts.
func unit(s *dispatch.Snapshot) string {
	if s.Steering == dispatch.SteeringTCP.String() {
		return "connection"
	}
	return "packet"
}

func verdictTable(s *dispatch.Snapshot) *table {
	var t table
	t.add(colourFaint, "VERDICT", strings.ToUpper(unit(s))+"S", "SHARE")
	names := slices.SortedFunc(maps.Keys(s.Verdicts), func(x, y string) int {
		return cmp.Or(cmp.Compare(s.Verdicts[y], s.Verdicts[x]), cmp.Compare(x, y))
	})
	for _, name := range names {
		n := s.Verdicts[name]
		if n == 0 {
			continue
		}
		t.add(colourNone, name, strconv.FormatUint(n, 10), fmt.Sprintf("%.1f%%", 100*float64(n)/float64(s.Packets)))
	}
	return &t
}
