// SPDX-License-Identifier: Apache-2.0

// Echo is a UDP server of a protocol that names no session, such as many games have: who
// sends from one address and port is one player, and his state is in one process. Start it
// again, with another build, and new players come to the new process, while the old one
// serves its own until they have left.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"instar/dispatch"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:7007", "`IP:port` to listen on")
	root := flag.String("root", dispatch.DefaultRoot, "`folder` on a bpffs for the group's pins")
	silence := flag.Duration("silence", 30*time.Second, "the `time` after which a player who sends nothing has left")
	workers := flag.Int("workers", 2, "sockets")
	flag.Parse()
	if err := run(*addr, *root, *silence, *workers); err != nil {
		log.Fatal(err)
	}
}

func run(addr, root string, silence time.Duration, workers int) error {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	group, err := dispatch.Open(dispatch.Options{
		Address: addr, Root: root, Service: "echo", Steering: dispatch.SteeringFlow, FlowTimeout: silence,
	})
	if err != nil {
		return err
	}
	generation, err := group.Join(workers)
	if err != nil {
		return errors.Join(err, group.Close())
	}
	for _, conn := range generation.Conns() {
		go echo(conn, generation.Number())
	}
	if err := generation.Activate(); err != nil {
		return errors.Join(err, generation.Close(), group.Close())
	}
	log.Printf("generation %d is active", generation.Number())

	for {
		o := dispatch.DrainOptions{Deadline: time.Hour}
		select {
		case <-generation.Superseded():
		case <-stop.Done():
			o = dispatch.DrainOptions{Deadline: time.Second, Final: true}
		}
		// It returns when the last player has left. A second upgrade meanwhile is no matter.
		report, err := generation.Drain(context.Background(), o)
		if errors.Is(err, dispatch.ErrReinstated) {
			continue // the successor died, or somebody rolled it back
		}
		log.Printf("drained: %s after %v, %d players were left", report.Reason, report.Waited.Round(time.Millisecond), report.Flows)
		return errors.Join(err, generation.Close(), group.Close())
	}
}

// echo answers each datagram with the player's state: how often he came.
func echo(conn *net.UDPConn, generation uint32) {
	times := make(map[string]int)
	b := make([]byte, 1500)
	for {
		n, player, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				log.Print(err)
			}
			return
		}
		times[player.String()]++
		answer := fmt.Sprintf("%d %d %d %s", generation, os.Getpid(), times[player.String()], b[:n])
		if _, err := conn.WriteToUDPAddrPort([]byte(answer), player); err != nil && !errors.Is(err, net.ErrClosed) {
			log.Print(err)
		}
	}
}
