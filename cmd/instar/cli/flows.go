// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"instar/dispatch"
)

func (a *app) flowsCommand() *cobra.Command {
	var generation uint32
	var peer string
	cmd := &cobra.Command{
		Use:   "flows GROUP",
		Short: "List the flows of a group with steering flow",
		Long: `List the flows that live in a group with steering "flow": whose packets come to
which worker of which generation, and how long ago one came. The table changes while
it is read; a flow may be missing, or come twice.

With --json each flow is a line of its own.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error {
			fits, err := peerFilter(peer)
			if err != nil {
				return usagef("flows: --peer: %w", err)
			}
			return a.flows(args[0], func(f dispatch.Flow) bool {
				return (generation == 0 || f.Generation == generation) && fits(f.Peer)
			})
		},
	}
	cmd.Flags().Uint32Var(&generation, "generation", 0, "only flows of generation `n`")
	cmd.Flags().StringVar(&peer, "peer", "", "only flows of this `address`: IP, IP:port, or prefix such as 192.0.2.0/24")
	a.jsonFlag(cmd)
	return cmd
}

// peerFilter reads an address, an address and port, or a prefix.
func peerFilter(text string) (func(netip.AddrPort) bool, error) {
	if text == "" {
		return func(netip.AddrPort) bool { return true }, nil
	}
	if ap, err := netip.ParseAddrPort(text); err == nil {
		ap = netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
		return func(p netip.AddrPort) bool { return p == ap }, nil
	}
	if ip, err := netip.ParseAddr(text); err == nil {
		return func(p netip.AddrPort) bool { return p.Addr() == ip.Unmap() }, nil
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return nil, fmt.Errorf("%q is no IP, IP:port or prefix", text)
	}
	return func(p netip.AddrPort) bool { return prefix.Contains(p.Addr()) }, nil
}

// flowJSON is a flow for programs.
type flowJSON struct {
	Version    int       `json:"version"`
	Peer       string    `json:"peer"`
	Generation uint32    `json:"generation"`
	Worker     int       `json:"worker"`
	Seen       time.Time `json:"seen"`
}

func (a *app) flows(name string, fits func(dispatch.Flow) bool) (err error) {
	g, _, _, err := a.open(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	var t table
	t.add(colourFaint, "PEER", "GENERATION", "WORKER", "LAST PACKET")
	now, found := a.env.Now(), 0
	encoder := json.NewEncoder(a.env.Stdout)
	var broken error
	err = g.Flows(func(f dispatch.Flow) bool {
		if !fits(f) {
			return true
		}
		found++
		if a.json {
			broken = encoder.Encode(flowJSON{jsonVersion, f.Peer.String(), f.Generation, f.Worker, f.Seen})
			return broken == nil
		}
		t.add(colourNone, f.Peer.String(), strconv.FormatUint(uint64(f.Generation), 10), strconv.Itoa(f.Worker), ago(now, f.Seen))
		return true
	})
	switch {
	case err != nil || broken != nil:
		return errors.Join(err, broken)
	case a.json:
		return nil
	case found == 0:
		a.printf("no flow lives")
		return nil
	}
	return t.write(a.env.Stdout, a.env.colours(a.env.Stdout))
}

// flowsLine says what the table of remembered flows holds.
func flowsLine(s *dispatch.Snapshot, counts *dispatch.FlowCounts) string {
	if counts == nil {
		return fmt.Sprintf("room for %d", s.FlowEntries)
	}
	live := 0
	for _, n := range counts.Live {
		live += n
	}
	how := map[string]string{
		dispatch.LearnReceived.String(): "remembered with the first packet",
		dispatch.LearnAnswered.String(): "remembered when the server answers",
		dispatch.LearnAssured.String():  "remembered when the server assures them",
	}[s.FlowLearning]
	return fmt.Sprintf("%d live, %d ended, %d evicted, room for %d; %s, forgotten after %v of silence",
		live, counts.Ended, counts.Evicted, counts.Room, how, time.Duration(s.FlowTimeout)*time.Second)
}
