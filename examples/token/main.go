// SPDX-License-Identifier: Apache-2.0

// Token is a UDP server of a protocol with session tokens: the server gives each player one,
// every datagram brings it back, and the kernel finds the player's process by it, from
// whatever address he plays. What names a session is said by a function of the server's own,
// token.bpf.c. Start it again, with another build, for an upgrade.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"instar/dispatch"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:7008", "`IP:port` to listen on")
	root := flag.String("root", dispatch.DefaultRoot, "`folder` on a bpffs for the group's pins")
	idle := flag.Duration("idle", time.Minute, "the `time` after which players who send nothing have left")
	flag.Parse()
	if err := run(*addr, *root, *idle); err != nil {
		log.Fatal(err)
	}
}

func run(addr, root string, idle time.Duration) error {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	dissector, err := dispatch.ObjectDissector(_TokenBytes, "token")
	if err != nil {
		return err
	}
	group, err := dispatch.Open(dispatch.Options{
		Address: addr, Root: root, Service: "token", Steering: dispatch.SteeringCustom, Dissector: dissector,
	})
	if err != nil {
		return err
	}
	generation, err := group.Join(2)
	if err != nil {
		return errors.Join(err, group.Close())
	}
	var players atomic.Int32
	for worker, conn := range generation.Conns() {
		go serve(conn, generation.Cookie(worker), &players)
	}
	if err := generation.Activate(); err != nil {
		return errors.Join(err, generation.Close(), group.Close())
	}
	log.Printf("generation %d is active", generation.Number())
	for {
		o := dispatch.DrainOptions{Idle: idle}
		select {
		case <-generation.Superseded():
		case <-stop.Done():
			o = dispatch.DrainOptions{Deadline: time.Second, Final: true}
		}
		report, err := generation.Drain(context.Background(), o)
		if errors.Is(err, dispatch.ErrReinstated) {
			continue
		}
		log.Printf("drained: %s, had %d players", report.Reason, players.Load())
		return errors.Join(err, generation.Close(), group.Close())
	}
}

// serve answers "tk", 1, the token, the process, and how often this player came; a new
// player gets the worker's cookie as his token, and a number behind it.
func serve(conn *net.UDPConn, cookie uint16, players *atomic.Int32) {
	times := make(map[uint32]int)
	b := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				log.Print(err)
			}
			return
		}
		if n < 9 || !bytes.HasPrefix(b, []byte("tk")) {
			continue
		}
		player := binary.BigEndian.Uint32(b[5:])
		if b[2] == 0 {
			player = uint32(players.Add(1))
			b[2] = 1
			binary.BigEndian.PutUint16(b[3:], cookie)
			binary.BigEndian.PutUint32(b[5:], player)
		}
		times[player]++
		answer := fmt.Appendf(bytes.Clone(b[:9]), "%d %d", os.Getpid(), times[player])
		if _, err := conn.WriteToUDPAddrPort(answer, from); err != nil && !errors.Is(err, net.ErrClosed) {
			log.Print(err)
		}
	}
}
